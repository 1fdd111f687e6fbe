"""The estimate of a text layer's activations, against what autograd saves."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from armature.components.families.tiny import TinySettings
from armature.components.models.compiled import _compiled, compile_layers
from armature.components.models.load import load_model
from armature.components.models.tiny import make_tiny_checkpoint
from armature.components.vlm.logprobs import Policy
from armature.components.vlm.memory import estimate_memory
from tests.compiling import without_kernels
from tests.vlm.conftest import model_settings, trainer_settings

TOKENS = 64
OUTSIDE = "sdpa_outside"
"""Name of an attention that is not compiled with its layer."""
AttentionInterface.register(OUTSIDE, torch.compiler.disable(sdpa_attention_forward))
AttentionMaskInterface.register(OUTSIDE, sdpa_mask)


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


def growth(name: str, dtype: str, folder: Path, **changes: Any) -> tuple[int, int]:
    """Return by how many bytes two more layers raise what autograd saves, and the estimate of it.

    Compiled layers have attention outside of compiled code, as with packed rows.
    """
    trainer, sizes = trainer_settings(max_tokens_per_micro_batch=TOKENS, **changes), []
    for layers in (2, 4):
        made = make_tiny_checkpoint(name, folder / str(layers), 0, TinySettings(layers=layers))
        settings = model_settings(source=str(made), dtype=dtype)
        model: Any = load_model(made, settings)
        if trainer.torch_compile:
            model.set_attn_implementation({"text_config": OUTSIDE})
            compile_layers(model)
        ids = torch.full((1, TOKENS), 7)
        cast = torch.autocast("cpu", torch.bfloat16, enabled=trainer.autocast == "bf16")
        with cast:
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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "dtype", "autocast"),
    [
        pytest.param("qwen2-vl", "bfloat16", "none", marks=pytest.mark.long),
        ("qwen2-vl", "float32", "bf16"),
        *(
            pytest.param(name, "bfloat16", "none", marks=pytest.mark.long)
            for name in ("qwen3-vl", "qwen3-vl-moe", "molmo2", "gemma3")
        ),
    ],
)
def test_estimate_equals_bytes_saved_by_compiled_layers(name: str, dtype: str, autocast: str, tmp_path: Path) -> None:
    """Norms' outputs and products of activations are computed again, and cast weights are not saved."""
    _compiled.cache_clear()
    with without_kernels():
        saved, estimated = growth(name, dtype, tmp_path, torch_compile=True, autocast=autocast)
    _compiled.cache_clear()
    assert estimated == pytest.approx(saved, rel=0.05)


def test_last_layers_keep_activations(tmp_path: Path) -> None:
    """With a share of a half, the first two of four layers recompute. Gradients have the same bits."""
    made = make_tiny_checkpoint("qwen2-vl", tmp_path / "model", 0, TinySettings(layers=4))
    trainer, ids = trainer_settings(max_tokens_per_micro_batch=TOKENS), torch.full((1, TOKENS), 7)
    saved, estimated, grads, recomputing = [], [], [], []
    for share in (False, 0.5, True):
        settings = model_settings(source=str(made), gradient_checkpointing=share)
        model: Any = load_model(made, settings)
        Policy(model, logprobs="torch", temperature=1.0)  # puts recomputing layers into training mode
        saved.append(saved_bytes(model, lambda model=model: model(input_ids=ids).logits.square().mean().backward()))
        estimated.append(estimate_memory(made, settings, trainer, "float32").activations)
        grads.append([parameter.grad for parameter in model.model.language_model.parameters()])
        recomputing.append([layer.gradient_checkpointing for layer in model.model.language_model.layers])
    whole, half, least = saved
    assert recomputing == [[False] * 4, [True, True, False, False], [True] * 4]
    assert whole - half == pytest.approx(half - least, rel=0.05)
    one_input = TOKENS * 64 * 4
    assert estimated == [estimated[0], estimated[0] // 2 + 2 * one_input, estimated[0] // 4 + 4 * one_input]
    assert all(torch.equal(one, other) for each in grads[1:] for one, other in zip(grads[0], each, strict=True))
