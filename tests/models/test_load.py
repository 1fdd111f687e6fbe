"""Loading, freezing, adapters and saving, for every family."""

from __future__ import annotations

import json
import resource
import shutil
import signal
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from pydantic import ValidationError
from safetensors.torch import load_file
from torch import nn
from transformers.models.smolvlm import processing_smolvlm

from armature.components.contracts.errors import DataError
from armature.components.families.family import COMPONENTS, FAMILIES
from armature.components.models.load import load_config, load_model, load_processor, read_model, save_checkpoint
from armature.components.models.settings import LoraSettings, ModelSettings
from armature.components.models.tiny import SMALL, make_tiny_checkpoint
from tests.family_table import record
from tests.refusals import refused
from tests.vlm.conftest import model_settings

SETTINGS = model_settings()

LORA = LoraSettings(rank=4, alpha=8.0, targets=("all",), scope="language")
LINEARS = {"glm4v": 12, "glm4v-moe": 14, "qwen3-vl-moe": 8, "qwen3.5": 15, "qwen3.5-moe": 17, "gemma4": 33}
"""Linear layers of the language model, if not seven in each of two layers. GLM has one for gate and up projection;
linear attention has five; experts are three-dimensional tensors, but shared experts and their gate are layers. Gemma 4
has four layers, two of which have keys and values, and three more for embeddings of layers."""


def _inputs(processor: Any, images: list[Image.Image]) -> dict[str, torch.Tensor]:
    parts = [{"type": "image"} for _ in images]
    text = processor.apply_chat_template(
        [{"role": "user", "content": [*parts, {"type": "text", "text": "what?"}]}],
        add_generation_prompt=True,
        tokenize=False,
    )
    return dict(processor(text=[text], images=[images], add_special_tokens=False, return_tensors="pt"))


def test_smolvlm_refuses_only_videos_without_num2words(checkpoint, monkeypatch, images):
    monkeypatch.setattr(processing_smolvlm, "num2words", None)
    processor = load_processor(checkpoint("smolvlm"), SETTINGS)
    assert "pixel_values" in _inputs(processor, images)
    frames = torch.zeros(1, 4, 3, 40, 40, dtype=torch.uint8)
    with pytest.raises(ImportError, match="num2words"):
        processor(text=["<video>"], videos=frames, return_tensors="pt")


def _backward(model: nn.Module, inputs: dict[str, torch.Tensor]) -> set[str]:
    """Run the model forward and backward, and return the names of the parameters that got a non-zero gradient."""
    model.train()
    logits = model(**inputs).logits
    logits[:, -1].log_softmax(-1)[:, 5].sum().backward()
    return {name for name, parameter in model.named_parameters() if parameter.grad is not None and parameter.grad.any()}


@pytest.mark.parametrize("name", FAMILIES)
def test_only_unfrozen_components_get_gradients(name, checkpoint, images):
    folder, family = checkpoint(name), FAMILIES[name]
    inputs = _inputs(load_processor(folder, SETTINGS), images)
    for frozen in COMPONENTS:
        model = load_model(folder, SETTINGS.model_copy(update={"freeze": (frozen,)}))
        reached = {family.component_of(key) for key in _backward(model, inputs)}
        assert reached == set(COMPONENTS) - {frozen}


@pytest.mark.parametrize("name", FAMILIES)
def test_adapters_are_only_in_the_language_model(name, checkpoint, images):
    folder, family = checkpoint(name), FAMILIES[name]
    model = load_model(folder, SETTINGS.model_copy(update={"lora": LORA}))
    adapted = {
        key.removeprefix("base_model.model.").rpartition(".lora_")[0]
        for key, parameter in model.named_parameters()
        if parameter.requires_grad
    }
    assert len(adapted) == LINEARS.get(name, 14)
    assert {family.component_of(key) for key in adapted} == {"language"}
    reached = _backward(model, _inputs(load_processor(folder, SETTINGS), images))
    assert reached
    assert all(".lora_" in key for key in reached)


@pytest.mark.parametrize("name", FAMILIES)
def test_saved_adapters_are_merged_under_base_names(name, checkpoint, images, tmp_path):
    folder = checkpoint(name)
    processor = load_processor(folder, SETTINGS)
    inputs = _inputs(processor, images)
    model = load_model(folder, SETTINGS.model_copy(update={"lora": LORA}))
    torch.manual_seed(0)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if ".lora_" in key:
                parameter.normal_(0, 0.2)
        before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
        expected = model(**inputs).logits
        save_checkpoint(model, processor, tmp_path / "saved")
        plain = load_model(folder, SETTINGS)(**inputs).logits
        merged = load_model(tmp_path / "saved", SETTINGS)(**inputs).logits
    assert all(torch.equal(before[key], tensor) for key, tensor in model.state_dict().items())
    torch.testing.assert_close(merged, expected, atol=2e-5, rtol=1e-4)
    assert (plain - expected).abs().max() > 0.05
    old, new = (load_file(path / "model.safetensors") for path in (folder, tmp_path / "saved"))
    assert {key: tensor.shape for key, tensor in old.items()} == {key: tensor.shape for key, tensor in new.items()}
    record(name, "lora")


@pytest.mark.parametrize("name", FAMILIES)
def test_saving_a_loaded_model_gives_the_same_bytes(name, checkpoint, tmp_path):
    folder = checkpoint(name)
    (tmp_path / "saved").mkdir()
    (tmp_path / "saved" / "stale").touch()
    save_checkpoint(load_model(folder, SETTINGS), load_processor(folder, SETTINGS), tmp_path / "saved")
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]
    assert {path.name for path in (tmp_path / "saved").iterdir()} == {path.name for path in folder.iterdir()}
    assert (tmp_path / "saved/model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()
    record(name, "load")


def test_dtype_attention_and_checkpointing_follow_settings(checkpoint):
    changed = {"dtype": "bfloat16", "attn_implementation": "eager", "gradient_checkpointing": True}
    model = load_model(checkpoint("qwen2-vl"), SETTINGS.model_copy(update=changed))
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert model.config.text_config._attn_implementation == "eager"
    assert model.is_gradient_checkpointing
    assert not model.training


@pytest.mark.parametrize("name", FAMILIES)
def test_mapped_weights_equal_the_loaded_model_s(name, checkpoint):
    folder, settings = checkpoint(name), SETTINGS.model_copy(update={"dtype": "bfloat16", "lora": LORA})
    torch.manual_seed(1)
    expected = load_model(folder, settings).state_dict()
    torch.manual_seed(1)
    model, weights = read_model(folder, settings)
    assert list(weights) == list(expected)
    for key, value in expected.items():
        assert value.dtype == weights[key].dtype and torch.equal(value, weights[key]), key
    parameters = {key: p for key, p in model.named_parameters() if ".lora_" not in key}
    assert all(p.untyped_storage().nbytes() == p.element_size() for p in parameters.values())
    assert str(folder / "model.safetensors") in Path("/proc/self/maps").read_text()


def test_audio_tower_does_not_prevent_loading(checkpoint, tmp_path):
    config = json.loads((checkpoint("gemma4") / "config.json").read_text())
    config["audio_config"] = {"model_type": "gemma4_audio", "hidden_size": 64, "num_hidden_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = load_model(tmp_path, SETTINGS.model_copy(update={"freeze": ("vision", "projector")}), empty=True)
    assert model.config.text_config._attn_implementation == "sdpa"
    frozen = {name.split(".")[1] for name, parameter in model.named_parameters() if not parameter.requires_grad}
    assert frozen == {"audio_tower", "embed_audio", "vision_tower", "embed_vision"}


def test_mapped_weights_keep_float32_modules(checkpoint, monkeypatch):
    folder, settings = checkpoint("qwen2-vl"), SETTINGS.model_copy(update={"dtype": "bfloat16"})
    kind = type(load_model(folder, settings, empty=True))
    monkeypatch.setattr(kind, "_keep_in_fp32_modules_strict", ["merger"])
    expected, (_, weights) = load_model(folder, settings).state_dict(), read_model(folder, settings)
    assert {value.dtype for value in expected.values()} == {torch.float32, torch.bfloat16}
    for key, value in expected.items():
        assert value.dtype == weights[key].dtype and torch.equal(value, weights[key]), key


def test_rejects_splitting_quantized_weights(checkpoint, tmp_path):
    config = json.loads((checkpoint("llava") / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "fp8"}}))
    with refused("quantization_not_split", tmp_path):
        read_model(tmp_path, SETTINGS)


def test_scope_all_adds_adapters_to_the_vision_tower(checkpoint):
    lora = LORA.model_copy(update={"scope": "all", "targets": ("q_proj",)})
    model = load_model(checkpoint("llava"), SETTINGS.model_copy(update={"lora": lora}))
    adapted = {key for key, parameter in model.named_parameters() if parameter.requires_grad}
    assert any("vision_tower" in key for key in adapted)
    frozen = SETTINGS.model_copy(update={"lora": lora, "freeze": ("vision",)})
    adapted = {key for key, p in load_model(checkpoint("llava"), frozen).named_parameters() if p.requires_grad}
    assert adapted
    assert not any("vision_tower" in key for key in adapted)


def test_rejects_unknown_adapter_target_and_lists_valid_ones(checkpoint):
    lora = LORA.model_copy(update={"targets": ("query",)})
    with refused("unknown_adapter_target", "'query'", "q_proj"):
        load_model(checkpoint("qwen2-vl"), SETTINGS.model_copy(update={"lora": lora}))


@pytest.mark.parametrize("tied", [True, False])
def test_rejects_adapter_on_a_tied_output_head(tied, tmp_path):
    folder = make_tiny_checkpoint("qwen3-vl", tmp_path / "x", 0, SMALL.model_copy(update={"tie_embeddings": tied}))
    lora = LORA.model_copy(update={"targets": ("q_proj", "lm_head")})
    settings = SETTINGS.model_copy(update={"lora": lora})
    if tied:
        with refused("tied_head_adapted", "model.lora.targets"):
            load_model(folder, settings)
    else:
        load_model(folder, settings)


def test_rejects_flash_attention_if_not_installed(checkpoint, tmp_path, monkeypatch):
    (tmp_path / "flash_attn" / "cute").mkdir(parents=True)  # a module of flash-attn-4
    monkeypatch.syspath_prepend(tmp_path)
    flash = SETTINGS.model_copy(update={"attn_implementation": "flash_attention_2"})
    with refused("flash_attention_missing", "flash-attn"):
        load_model(checkpoint("qwen2-vl"), flash)


def test_full_disk_keeps_the_earlier_checkpoint(checkpoint, tmp_path):
    folder = checkpoint("qwen2-vl")
    model, processor = load_model(folder, SETTINGS), load_processor(folder, SETTINGS)
    save_checkpoint(model, processor, tmp_path / "saved")
    before = {path.name: path.read_bytes() for path in (tmp_path / "saved").iterdir()}
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    for most, code in ((100, "disk_full"), (20_000, "store_failed")):  # no space for the configuration, the weights
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (most, limits[1]))
            with refused(code, tmp_path / "saved"):
                save_checkpoint(model, processor, tmp_path / "saved")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    signal.signal(signal.SIGXFSZ, handler)
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]
    assert {path.name: path.read_bytes() for path in (tmp_path / "saved").iterdir()} == before


def _edit(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    config = json.loads((folder / "config.json").read_text())
    change(config)
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("weights", "sizes", "name"),
    [
        ("llava", {}, "mixed"),
        ("qwen2-vl", {"num_key_value_heads": 1, "intermediate_size": 96}, "layers.0.mlp."),
        ("qwen2-vl", {"num_hidden_layers": 1, "layer_types": ["full_attention"]}, "layers.1."),
    ],
    ids=["another model", "another shape", "more layers"],
)
def test_rejects_weights_that_do_not_fit_the_configuration(checkpoint, tmp_path, weights, sizes, name):
    mixed = shutil.copytree(checkpoint("qwen2-vl"), tmp_path / "mixed")
    (mixed / "model.safetensors").write_bytes((checkpoint(weights) / "model.safetensors").read_bytes())
    _edit(mixed, lambda config: config["text_config"].update(sizes))
    with refused("weights_mismatch", mixed, name):
        load_model(mixed, SETTINGS)


@pytest.mark.parametrize(
    "change",
    [
        {"text_config": None},  # the class's defaults: 72 billion parameters
        {"vision_config": None},
        {"text_config": {"num_hidden_layers": 10**9}},
        {"text_config": {"vocab_size": 10**12}},
        {"text_config": {"hidden_size": -128}},
        {"text_config": {"hidden_size": "wide"}},
        {"text_config": []},
        {"vision_config": {"patch_size": 0}},
        {"text_config": {"rope_parameters": 3}},
    ],
)
@pytest.mark.parametrize("family", ["qwen2-vl", "llava"])
def test_rejects_oversized_configuration_without_using_memory(checkpoint, tmp_path, change, family):
    mixed = shutil.copytree(checkpoint(family), tmp_path / "mixed")

    def update(config: dict[str, Any]) -> None:
        for key, value in change.items():
            config[key] = config[key] | value if isinstance(value, dict) else value

    _edit(mixed, update)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(DataError):
        load_model(mixed, SETTINGS)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 500_000  # KiB


def _header(document: object, data: bytes = b"") -> bytes:
    text = json.dumps(document).encode()
    return struct.pack("<Q", len(text)) + text + data


@pytest.mark.parametrize(
    "content",
    [
        struct.pack("<Q", 2**60) + b"{}",
        _header({"lm_head.weight": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}, b"1234"),
    ],
    ids=["huge header", "truncated data"],
)
def test_rejects_damaged_weights_by_file_name(checkpoint, tmp_path, content):
    damaged = shutil.copytree(checkpoint("llava"), tmp_path / "damaged")
    (damaged / "model.safetensors").write_bytes(content)
    with refused("safetensors_unreadable", damaged / "model.safetensors"):
        load_model(damaged, SETTINGS)


def test_rejects_folder_without_configuration(tmp_path):
    with refused("foreign_file_unreadable", tmp_path):
        load_config(tmp_path, SETTINGS)


@pytest.mark.parametrize(
    "change",
    (
        {"trust_remote_code": True, "source": "org/name", "revision": "main"},
        {"freeze": ("vision", "projector", "language")},
        {"source": "tiny/qwen2-vl"},
        {"freeze": ("visual",)},
    ),
)
def test_rejects_contradicting_settings(change):
    with pytest.raises(ValidationError):
        ModelSettings.model_validate(SETTINGS.model_dump() | change)
