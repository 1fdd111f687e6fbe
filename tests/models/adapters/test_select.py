"""Selecting or inferring a model's adapter, and errors if no adapter fits."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from armature.components.families.family import FAMILIES, ImageInputs
from armature.components.models.adapters import SampleCollator, get_adapter, get_collator
from armature.components.models.adapters.select import infer_spec
from armature.components.models.source import make_reference
from tests.refusals import refused

NOT_INFERABLE = {
    "molmo2": "image_token_pooling",  # indices into a batch
    **dict.fromkeys(("idefics3", "smolvlm"), "pixel_values"),  # the tiles of all images are joined along dim 1
}
"""Families whose image inputs cannot be inferred from their processor, with the output that is the reason."""


def image_inputs(family: str) -> ImageInputs:
    assert FAMILIES[family].images is not None
    return replace(FAMILIES[family].images, reserved=FAMILIES[family].image_tokens)


def test_folder_name_and_config_give_the_same_image_inputs(tiny):
    for model in (tiny.folder, str(tiny.folder), tiny.family, tiny.model.config):
        assert get_collator(model, tiny.processor).spec == image_inputs(tiny.family)


def test_get_collator_follows_a_model_artifact_s_reference(qwen, tmp_path):
    make_reference(str(qwen.folder), None).write(tmp_path)
    assert get_collator(tmp_path, qwen.processor).spec == image_inputs("qwen2-vl")


def test_collator_can_be_pickled(tiny):
    image = tiny.images[tiny.image(64, 150)]
    copy = pickle.loads(pickle.dumps(get_collator(tiny.folder, tiny.processor)))
    for name, value in tiny.collator.process_image(image).items():
        assert torch.equal(copy.process_image(image)[name], value)


def test_inferred_image_inputs_equal_the_described_ones(tiny):
    if tiny.family in NOT_INFERABLE:
        with refused("adapter_not_inferable", NOT_INFERABLE[tiny.family]):
            get_collator("some_new_vlm", tiny.processor)
        return
    inferred = get_collator("some_new_vlm", tiny.processor)
    written = tiny.collator
    assert inferred.image_token_id == written.image_token_id
    assert inferred.spec.type_ids == written.spec.type_ids
    assert inferred.typed_token_ids == written.typed_token_ids
    assert inferred.spec.joins.keys() == written.spec.joins.keys()
    assert written.image_token_id in inferred.forbidden_token_ids
    assert tiny.processor.tokenizer.eos_token_id not in inferred.forbidden_token_ids
    assert not inferred.spec.merge_turns
    features = [written.process_image(tiny.images[tiny.image(*size)]) for size in ((90, 40), (300, 260), (50, 50))]
    for name, value in written.join(features).items():
        assert torch.equal(inferred.join(features)[name], value)


class Counting:
    """A processor with an output that depends on the position of the image within the call."""

    def __init__(self, processor: Any) -> None:
        self.inner, self.tokenizer, self.image_token = processor, processor.tokenizer, processor.image_token

    def __call__(self, images: Any, text: Any, return_tensors: str) -> Any:
        outputs = self.inner(images=images, text=text, return_tensors=return_tensors)
        return outputs | {"image_number": torch.arange(len(images))}


def test_rejects_processor_that_no_join_reproduces(qwen):
    with refused("adapter_not_inferable", "image_number", "armature.families"):
        infer_spec(Counting(qwen.processor))
    with refused("image_token_missing", "image_token", "SimpleNamespace"):
        infer_spec(SimpleNamespace(tokenizer=qwen.processor.tokenizer))


def test_rejects_processor_with_undeclared_outputs(qwen):
    collator = SampleCollator(qwen.processor, FAMILIES["llava"].images)
    with refused("processor_outputs_mismatch", ["image_grid_thw", "pixel_values"]):
        collator.process_image(qwen.images[qwen.image(100, 80)])


def test_rejects_tokenizer_and_processor_of_another_model(qwen, tmp_path):
    with refused("processor_needed", type(qwen.processor.tokenizer).__name__):
        get_adapter("qwen2-vl", qwen.processor.tokenizer)
    config = json.loads((qwen.folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"image_token_id": 99}))
    with refused("image_token_mismatch", 99, qwen.collator.image_token_id):
        get_adapter(tmp_path, qwen.processor)
    with refused("image_token_missing", FAMILIES["gemma3"].images.feature_token):
        SampleCollator(qwen.processor, FAMILIES["gemma3"].images)


@pytest.mark.parametrize("model", ["Qwen/Qwen2-VL-2B-Instruct", Path("nowhere")])
def test_rejects_model_without_a_folder(qwen, model):
    with refused("config_missing", f"{model}/config.json"):
        get_adapter(model, qwen.processor)


def test_adapters_package_imports_without_torch():
    code = "import armature.components.models.adapters, sys; assert not {'torch', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
