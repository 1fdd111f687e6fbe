"""Attention among the tokens of an image, causal or bidirectional: settings, checkpoints and models agree."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor

from armature.components.families.family import FAMILIES
from armature.components.models.attention import image_blocks
from armature.components.models.load import load_config, load_model, load_processor, save_checkpoint
from armature.components.models.tiny import SMALL, make_tiny_checkpoint
from tests.refusals import refused
from tests.vlm.conftest import model_settings

SETTINGS = model_settings()

WITH_CHOICE = tuple(name for name, family in FAMILIES.items() if family.image_attention)
OLD, NEW = Image.effect_noise((100, 80), 64.0).convert("RGB"), Image.new("RGB", (64, 150), (30, 30, 200))


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> Callable[[str, str], Path]:
    """Return a function that returns the checkpoint of a family with the chosen kind of image attention. The weights do
    not depend on the kind."""
    root = tmp_path_factory.mktemp("attention")
    sizes = SMALL.model_copy(update={"image_side": 56})

    def build(family: str, chosen: Any) -> Path:
        folder = root / family / chosen
        return folder if folder.exists() else make_tiny_checkpoint(family, folder, 0, sizes, chosen)

    return build


def _inputs(folder: Path, count: int) -> dict[str, Any]:
    processor = AutoProcessor.from_pretrained(folder)
    marker = getattr(processor, "boi_token", processor.image_token)
    text = "".join(f"look {marker} " for _ in range(count)) + "and say"
    return dict(processor(images=[[OLD, NEW][:count]] if count else None, text=[text], return_tensors="pt"))


@pytest.mark.parametrize("family", WITH_CHOICE)
def test_causal_checkpoint_equals_the_model_without_type_ids(family, folders):
    folder = folders(family, "causal")
    assert json.loads((folder / "config.json").read_text())["is_mm_prefix_lm"] is False
    inputs = _inputs(folder, 1)
    bare = {name: value for name, value in inputs.items() if not name.endswith("token_type_ids")}
    native, causal = AutoModelForImageTextToText.from_pretrained(folder), load_model(folder, SETTINGS)
    both_ways = load_model(folders(family, "bidirectional"), SETTINGS)
    with torch.no_grad():
        assert torch.equal(causal(**inputs).logits, native(**bare).logits)
        assert torch.equal(causal(**bare).logits, native(**bare).logits)
        torch.testing.assert_close(causal.train()(**bare).logits, causal.eval()(**bare).logits, atol=1e-5, rtol=0)
        assert (both_ways(**inputs).logits - causal(**inputs).logits).abs().max() > 0.01


@pytest.mark.parametrize("implementation", ("sdpa", "eager"))
def test_molmo2_with_one_image_equals_transformers(implementation, folders):
    folder = folders("molmo2", "bidirectional")
    settings = SETTINGS.model_copy(update={"attn_implementation": implementation})
    native = AutoModelForImageTextToText.from_pretrained(folder, attn_implementation=implementation)
    with torch.no_grad():
        for inputs in (_inputs(folder, 1), _inputs(folder, 0)):
            assert torch.equal(load_model(folder, settings)(**inputs).logits, native(**inputs).logits)


@pytest.mark.parametrize("implementation", ("sdpa", "eager"))
def test_later_image_does_not_change_earlier_logits(implementation, folders):
    """In transformers a later image changes the logits of earlier tokens, which shows that the test can fail."""
    folder = folders("molmo2", "bidirectional")
    settings = SETTINGS.model_copy(update={"attn_implementation": implementation})
    one, two = _inputs(folder, 1), _inputs(folder, 2)
    common = one["input_ids"].shape[1] - 2  # the words after the first image differ
    changes = []
    for model in (
        load_model(folder, settings),
        AutoModelForImageTextToText.from_pretrained(folder, attn_implementation=implementation),
    ):
        with torch.no_grad():
            before, after = model(**one).logits[0, :common], model(**two).logits[0, :common]
        same = (one["input_ids"][0, :common] == two["input_ids"][0, :common]).cumprod(0).bool()
        assert same.sum() > 20
        changes.append(float((before - after)[same].abs().max()))
    assert changes[0] < 1e-5
    assert changes[1] > 0.01


def test_image_blocks_are_whole_images_numbered_over_the_batch(folders):
    folder = folders("molmo2", "bidirectional")
    processor, config = AutoProcessor.from_pretrained(folder), load_config(folder, SETTINGS)
    texts = ["a <|image|><|image|> b", "no image here", "<|image|>"]
    inputs = processor(
        images=[[OLD, NEW], [], [OLD]], text=texts, return_tensors="pt", padding=True, padding_side="left"
    )
    blocks = image_blocks(inputs["input_ids"], inputs["mm_token_type_ids"], inputs["image_grids"], config)
    sizes = processor._get_num_multimodal_tokens(image_sizes=[(80, 100), (150, 64), (80, 100)])["num_image_tokens"]
    assert [(blocks == number).sum().item() for number in range(3)] == sizes
    for row, numbers in enumerate(((0, 1), (), (2,))):
        assert set(blocks[row].tolist()) - {-1} == set(numbers)
        assert blocks[row][blocks[row] >= 0].diff().ge(0).all()  # one after another, none inside another
    marked = torch.isin(inputs["input_ids"], torch.tensor(processor.image_token_ids))
    assert torch.equal(blocks >= 0, marked)


def test_rejects_images_without_type_ids_in_bidirectional_mode(folders):
    folder = folders("molmo2", "bidirectional")
    inputs = _inputs(folder, 1)
    inputs.pop("mm_token_type_ids")
    with refused("image_types_missing", "mm_token_type_ids"):
        load_model(folder, SETTINGS)(**inputs)


@pytest.mark.parametrize("chosen", ("causal", "bidirectional"))
def test_saved_checkpoint_keeps_its_image_attention(chosen, folders, tmp_path):
    folder = folders("molmo2", chosen)
    save_checkpoint(load_model(folder, SETTINGS), load_processor(folder, SETTINGS), tmp_path / "saved")
    load_config(tmp_path / "saved", SETTINGS.model_copy(update={"image_attention": chosen}))
    assert json.loads((tmp_path / "saved/config.json").read_text())["is_mm_prefix_lm"] is (chosen == "bidirectional")


def test_rejects_checkpoint_with_another_image_attention(folders):
    with refused("image_attention_mismatch", "causal", '"is_mm_prefix_lm": false'):
        load_model(folders("molmo2", "bidirectional"), SETTINGS.model_copy(update={"image_attention": "causal"}))


def test_rejects_image_attention_for_families_with_only_one_kind(checkpoint, tmp_path):
    with refused("image_attention_fixed", "llava", "gemma3, molmo2"):
        load_config(checkpoint("llava"), SETTINGS.model_copy(update={"image_attention": "causal"}))
    with refused("image_attention_fixed", "qwen2-vl"):
        make_tiny_checkpoint("qwen2-vl", tmp_path / "x", 0, image_attention="bidirectional")


def test_rejects_flash_attention_for_bidirectional_images(folders):
    flash = SETTINGS.model_copy(update={"attn_implementation": "flash_attention_2"})
    with refused("flash_attention_causal", "model.attn_implementation"):
        load_config(folders("molmo2", "bidirectional"), flash)
    load_config(folders("molmo2", "causal"), flash)
