"""Molmo2's two weight layouts, and code from a checkpoint."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoModelForImageTextToText, AutoProcessor, AutoTokenizer

from armature.components.families.family import FAMILIES, image_token_ids
from armature.components.models.load import load_config, load_model, load_processor, save_checkpoint
from armature.components.models.molmo2 import EMBEDDING_PARTS, from_hub, to_hub
from armature.components.models.tiny import SMALL, make_tiny_checkpoint
from tests.refusals import refused
from tests.vlm.conftest import model_settings

SETTINGS = model_settings()


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Return a checkpoint in which the sizes of queries, keys and feed-forward layers are all different."""
    sizes = SMALL.model_copy(update={"key_value_heads": 1, "image_side": 56, "layers": 3})
    return make_tiny_checkpoint("molmo2", tmp_path_factory.mktemp("molmo2") / "hub", seed=0, settings=sizes)


def _equal(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def test_files_use_the_released_layout_with_a_split_embedding(folder):
    weights = load_file(folder / "model.safetensors")
    text = load_config(folder, SETTINGS).text_config
    rows = [weights[part].shape[0] for part in EMBEDDING_PARTS]
    assert rows == [text.vocab_size, text.additional_vocab_size]
    assert weights["lm_head.weight"].shape[0] == text.vocab_size
    assert "model.transformer.wte.embedding" in weights
    places = ("model.transformer.", "model.vision_backbone.", "lm_head.")
    assert {name for name in weights if not name.startswith(places)} == set()


def test_image_tokens_have_an_embedding_but_no_output_row(folder):
    tokenizer = AutoProcessor.from_pretrained(folder).tokenizer
    text = load_config(folder, SETTINGS).text_config
    ids = image_token_ids(FAMILIES["molmo2"], tokenizer)
    assert len(ids) == 10
    assert text.vocab_size <= min(ids)
    assert max(ids) < text.vocab_size + text.additional_vocab_size
    assert tokenizer.bos_token_id > 0


def test_layouts_convert_into_each_other_bit_for_bit(folder):
    model = load_model(folder, SETTINGS)
    native, hub = model.state_dict(), load_file(folder / "model.safetensors")
    assert _equal(to_hub(native, model.config), hub)
    assert _equal(from_hub(hub, model.config), dict(native))
    assert _equal(from_hub(to_hub(native, model.config), model.config), dict(native))


def test_transformers_loads_both_layouts_as_the_same_model(folder, tmp_path):
    """transformers' own conversion is the independent reference."""
    by_transformers, report = AutoModelForImageTextToText.from_pretrained(folder, output_loading_info=True)
    assert not any(report.values())
    other = shutil.copytree(folder, tmp_path / "native")
    native = from_hub(load_file(folder / "model.safetensors"), by_transformers.config)
    save_file({name: one.contiguous() for name, one in native.items()}, other / "model.safetensors", {"format": "pt"})
    from_native = load_model(other, SETTINGS)
    assert _equal(dict(from_native.state_dict()), dict(by_transformers.state_dict()))
    save_checkpoint(from_native, load_processor(other, SETTINGS), tmp_path / "saved")
    assert (tmp_path / "saved/model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()


def test_released_configuration_keys_are_accepted(folder, tmp_path):
    """Released checkpoints use the keys vit_config, vit_layers and image_num_pos."""
    other = shutil.copytree(folder, tmp_path / "released")
    config = json.loads((other / "config.json").read_text())
    vision = config.pop("vision_config")
    vision["image_default_input_size"] = vision.pop("image_size")
    vision["image_patch_size"] = vision.pop("patch_size")
    vision["image_num_pos"] = vision.pop("num_position_embeddings")
    config["vit_config"] = vision
    config["adapter_config"]["vit_layers"] = config["adapter_config"].pop("vision_feature_layer")
    (other / "config.json").write_text(json.dumps(config))
    assert _equal(dict(load_model(other, SETTINGS).state_dict()), dict(load_model(folder, SETTINGS).state_dict()))


def test_rejects_incomplete_fused_weights_and_unknown_names(folder):
    config = load_config(folder, SETTINGS)
    hub = load_file(folder / "model.safetensors")
    native = load_model(folder, SETTINGS).state_dict()
    native.pop("model.language_model.layers.1.self_attn.k_proj.weight")
    with refused("weights_layout_mismatch", "blocks.1.self_attn.att_proj"):
        to_hub(native, config)
    hub.pop(EMBEDDING_PARTS[1])
    with refused("weights_layout_mismatch", EMBEDDING_PARTS[0]):
        from_hub(hub, config)
    for convert, name in ((to_hub, "model.transformer.ln_f.weight"), (from_hub, "model.language_model.norm.weight")):
        with refused("weights_layout_mismatch", name):
            convert({name: torch.ones(2)}, config)


def test_rejects_tied_embeddings(tmp_path):
    with refused("tied_embeddings_unsupported", "model.tiny.tie_embeddings"):
        make_tiny_checkpoint("molmo2", tmp_path / "x", 0, SMALL.model_copy(update={"tie_embeddings": True}))


MODELING = """
from transformers import Molmo2Config, Molmo2ForConditionalGeneration, Molmo2Model
class OtherConfig(Molmo2Config):
    pass
class OtherModel(Molmo2Model):
    config_class = OtherConfig
class OtherForConditionalGeneration(Molmo2ForConditionalGeneration):
    config_class = OtherConfig
    def __init__(self, config):
        super().__init__(config)
        self.model = OtherModel(config)
        self.post_init()
"""
PROCESSING = """
from transformers import Molmo2Processor, ProcessorMixin
class OtherProcessor(ProcessorMixin):
    image_placeholder_token = "<|image|>"
    def __init__(self, image_processor=None, video_processor=None, tokenizer=None, chat_template=None, **kwargs):
        super().__init__(image_processor, video_processor, tokenizer, chat_template=chat_template)
    def __call__(self, images=None, text=None, videos=None, **kwargs):
        native = Molmo2Processor(self.image_processor, self.video_processor, self.tokenizer)
        return native(images=images, text=text, **kwargs)
"""


@pytest.fixture(scope="module")
def remote(folder, tmp_path_factory) -> Path:
    """Return the checkpoint of `folder` with Python code added. The processor in this code lacks attributes that
    servers use."""
    target = shutil.copytree(folder, tmp_path_factory.mktemp("remote") / "checkpoint")
    (target / "modeling_other.py").write_text(MODELING)
    (target / "processing_other.py").write_text(PROCESSING)
    native = from_hub(load_file(folder / "model.safetensors"), load_config(folder, SETTINGS))
    save_file({name: one.contiguous() for name, one in native.items()}, target / "model.safetensors", {"format": "pt"})
    config = json.loads((target / "config.json").read_text())
    config["auto_map"] = {
        "AutoConfig": "modeling_other.OtherConfig",
        "AutoModelForImageTextToText": "modeling_other.OtherForConditionalGeneration",
    }
    (target / "config.json").write_text(json.dumps(config))
    processor = json.loads((target / "processor_config.json").read_text())
    processor["auto_map"] = {"AutoProcessor": "processing_other.OtherProcessor"}
    processor["processor_class"] = "OtherProcessor"
    (target / "processor_config.json").write_text(json.dumps(processor))
    return target


TRUSTED = SETTINGS.model_copy(update={"trust_remote_code": True})


def test_remote_classes_get_the_attributes_of_native_ones(remote, folder):
    model = load_model(remote, TRUSTED)
    assert type(model).__name__ == "OtherForConditionalGeneration"
    assert type(AutoModel.from_config(model.config)) is type(model.model)
    ours, native = load_processor(remote, TRUSTED), AutoProcessor.from_pretrained(folder)
    assert type(ours).__name__ == "OtherProcessor"
    assert (ours.image_token, ours.image_token_id) == (native.image_token, native.image_token_id)
    sizes = [(80, 100), (150, 64), (300, 300)]
    expected = native._get_num_multimodal_tokens(image_sizes=sizes)
    counts = ours._get_num_multimodal_tokens(image_sizes=sizes)
    assert counts["num_image_tokens"] == expected["num_image_tokens"]
    assert counts["num_image_patches"] == expected["num_image_patches"]
    assert ours._get_num_multimodal_tokens() == {"num_image_tokens": [], "num_image_patches": []}


def test_remote_code_runs_only_if_trusted(remote):
    assert type(load_model(remote, SETTINGS)).__name__ == "Molmo2ForConditionalGeneration"
    with refused("foreign_file_unreadable", remote, "model.trust_remote_code = true"):
        load_processor(remote, SETTINGS)


def test_rejects_tokenizer_in_place_of_a_processor(folder, tmp_path, monkeypatch):
    other = shutil.copytree(folder, tmp_path / "text")
    (other / "processor_config.json").unlink()
    with refused("foreign_file_unreadable", other):
        load_processor(other, SETTINGS)
    monkeypatch.setattr("armature.components.models.load.AutoProcessor", AutoTokenizer)
    with refused("image_processor_missing", folder):
        load_processor(folder, SETTINGS)
