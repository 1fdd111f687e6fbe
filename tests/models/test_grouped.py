"""Grouped products of experts equal the loop over experts, gradients included."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from armature.components.families.family import FAMILIES
from armature.components.models.grouped import GROUPED
from armature.components.models.load import load_model
from armature.components.vlm.memory import expert_values
from tests.vlm.conftest import model_settings

MIXTURES = [name for name in FAMILIES if name.endswith("-moe")]
TOKENS, CHOSEN = 50, 3


def outcome(experts: torch.nn.Module, way: str, dtype: torch.dtype, autocast: bool) -> list[Tensor]:
    """Return the output for random tokens, and gradients of tokens, weights and parameters. No token has the last
    expert."""
    random = torch.Generator().manual_seed(0)
    experts.config._experts_implementation = way
    width, count = experts.gate_up_proj.shape[-1], len(experts.gate_up_proj)
    hidden = torch.randn(TOKENS, width, generator=random).to(dtype).requires_grad_()
    chosen = torch.rand(TOKENS, count - 1, generator=random).argsort(-1)[:, :CHOSEN]
    weights = torch.rand(TOKENS, CHOSEN, generator=random).to(dtype).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        out = experts(hidden, chosen, weights)
    assert out.dtype == dtype and out.abs().max() > 1e-2
    leaves = [hidden, weights, *experts.parameters()]
    gradients = torch.autograd.grad((out * torch.linspace(-1, 1, width)).sum(), leaves)
    return [out.detach(), *gradients]


@pytest.mark.parametrize("family", MIXTURES)
@pytest.mark.parametrize(
    ("dtype", "autocast", "tolerance"),
    [
        (torch.float64, False, 1e-14),
        (torch.float32, False, 1e-6),
        (torch.bfloat16, False, 1e-2),
        (torch.float32, True, 1e-2),
    ],
    ids=["float64", "float32", "bfloat16", "autocast"],
)
def test_grouped_products_equal_loop_over_experts(family, dtype, autocast, tolerance, checkpoint):
    model = load_model(checkpoint(family), model_settings())
    assert model.config.text_config._experts_implementation == GROUPED
    experts = model.model.language_model.layers[1].mlp.experts
    torch.nn.init.normal_(experts.gate_up_proj, std=0.1, generator=torch.Generator().manual_seed(1))
    torch.nn.init.normal_(experts.down_proj, std=0.1, generator=torch.Generator().manual_seed(2))
    experts.to(dtype)
    for grouped, loop in zip(
        outcome(experts, GROUPED, dtype, autocast), outcome(experts, "eager", dtype, autocast), strict=True
    ):
        assert (grouped - loop).norm() <= tolerance * loop.norm()


def test_grouped_products_compute_in_bf16_under_autocast(checkpoint):
    """The loop's products round to bf16 and its sum is in fp32. An output with the same bits rounds likewise."""
    experts = load_model(checkpoint("qwen3-vl-moe"), model_settings()).model.language_model.layers[1].mlp.experts
    with torch.no_grad():
        for parameter in experts.parameters():
            parameter.normal_(std=0.1, generator=torch.Generator().manual_seed(1))
    grouped, loop, plain = (
        outcome(experts, way, torch.float32, autocast)[0]
        for way, autocast in ((GROUPED, True), ("eager", True), ("eager", False))
    )
    rounding = (loop - plain).norm()
    assert (grouped - loop).norm() < 0.1 * rounding


def test_memory_estimate_counts_what_grouped_products_save(checkpoint):
    model = load_model(checkpoint("qwen3-vl-moe"), model_settings())
    experts, saved = model.model.language_model.layers[1].mlp.experts, dict[int, int]()
    inputs = [torch.randn(TOKENS, 64, requires_grad=True), torch.arange(2 * TOKENS).view(TOKENS, 2) % 8]
    owned = {parameter.data_ptr() for parameter in experts.parameters()}

    def keep(tensor: Tensor) -> Tensor:
        if tensor.is_floating_point() and tensor.untyped_storage().data_ptr() not in owned:
            saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        out = experts(*inputs, torch.rand(TOKENS, 2, requires_grad=True))
    weights = TOKENS * 2 * 4
    assert out.requires_grad
    assert sum(saved.values()) - weights == 4 * TOKENS * expert_values(model.config.text_config)
