"""The estimate of a vision tower's activations, against towers that compute an image."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from armature.components.families.family import FAMILIES, family_of
from armature.components.models.adapters.family import model_inputs
from armature.components.models.load import load_model
from armature.components.vlm.memory import IMAGE_TOKENS, estimate_memory, vision_tower
from tests.family_table import ALL
from tests.vlm.conftest import Tiny, model_settings, trainer_settings

UNEVEN = {"llava-next", "gemma4"}
"""Families whose towers also compute patches that become no token, up to as many as those that do."""
COVERED = sorted(FAMILIES.keys() - UNEVEN) if ALL else ["qwen2-vl", "gemma3", "internvl", "molmo2"]


@pytest.mark.parametrize("name", COVERED)
def test_tower_has_the_layers_the_width_and_the_patches_that_compute_an_image(
    name: str, make_tiny: Callable[..., Tiny]
) -> None:
    tiny = make_tiny(name)
    model: Any = load_model(tiny.folder, model_settings())
    family, sample = family_of(model.config), tiny.samples(2, seed=0, n_images=(1,))[0]
    prefixes = tuple(f"{prefix}." for prefix in family.vision)
    layers = [
        module
        for part, module in model.named_modules()
        if part.startswith(prefixes) and isinstance(module, GradientCheckpointingLayer)
    ]
    seen: list[torch.Size] = []

    def note(_: nn.Module, __: object, output: Any) -> None:
        seen.append((output if isinstance(output, torch.Tensor) else output[0]).shape)

    for layer in layers:
        layer.register_forward_hook(note)
    batch = tiny.collator.collate([sample], tiny.images.open)
    with torch.no_grad():
        model(**model_inputs(batch))
    count, width, patches = vision_tower(model.config)
    assert (len(seen), {shape[-1] for shape in seen}) == (count, {width})
    tokens = int((batch.input_ids == getattr(model.config, family.placeholder)).sum())
    assert seen[0][:-1].numel() / tokens == pytest.approx(patches, rel=0.1)


@pytest.mark.parametrize("recomputed", [False, True])
def test_images_count_where_the_tower_is_trained(tiny: Tiny, recomputed: bool) -> None:
    def images(**model: Any) -> int:
        settings = model_settings(gradient_checkpointing=recomputed, **model)
        return estimate_memory(tiny.folder, settings, trainer_settings(), "float32").images

    layers, width, patches = vision_tower(tiny.model().config)
    values = 17 + layers if recomputed else 17 * layers
    assert images() == 4 * width * values * patches * IMAGE_TOKENS * trainer_settings().max_tokens_per_micro_batch
    adapters = {"rank": 2, "targets": ("all",), "scope": "all"}
    assert images(lora=adapters) == images()
    assert images(freeze=("vision",)) == images(lora=adapters | {"scope": "language"}) == 0
