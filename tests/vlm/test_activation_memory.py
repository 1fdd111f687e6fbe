"""The estimate of a text layer's activations, against what autograd saves."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from armature.components.families.tiny import TinySettings
from armature.components.models.load import load_model
from armature.components.models.tiny import make_tiny_checkpoint
from armature.components.vlm.memory import estimate_memory
from tests.vlm.conftest import model_settings, trainer_settings

TOKENS = 64


def saved_bytes(model: Any, run: Callable[[], object]) -> int:
    """Return the bytes of all tensors but weights that autograd saves while `run` computes."""
    owned = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    saved: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        saved.setdefault(tensor.untyped_storage().data_ptr(), tensor)  # which keeps the address in use
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        run()
    return sum(each.untyped_storage().nbytes() for address, each in saved.items() if address not in owned)


def growth(name: str, dtype: str, folder: Path) -> tuple[int, int]:
    """Return by how many bytes two more layers raise what autograd saves, and the estimate of it."""
    trainer, sizes = trainer_settings(max_tokens_per_micro_batch=TOKENS), []
    for layers in (2, 4):
        made = make_tiny_checkpoint(name, folder / str(layers), 0, TinySettings(layers=layers))
        settings = model_settings(source=str(made), dtype=dtype)
        model: Any = load_model(made, settings)
        ids = torch.full((1, TOKENS), 7)
        saved = saved_bytes(model, partial(model, input_ids=ids, attention_mask=torch.ones_like(ids)))
        sizes.append((saved, estimate_memory(made, settings, trainer, dtype).activations))
    (few, estimated), (more, estimated_more) = sizes
    return more - few, estimated_more - estimated


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("qwen2-vl", 0.02),
        ("qwen3-vl", 0.02),  # norms of queries and keys
        ("qwen3-vl-moe", 0.02),
        ("molmo2", 0.02),
        ("gemma3", 0.15),  # four norms, which are computed in another way
    ],
)
def test_estimate_is_what_layers_save(name: str, near: float, dtype: str, tmp_path: Path) -> None:
    saved, estimated = growth(name, dtype, tmp_path)
    assert estimated == pytest.approx(saved, rel=near)
