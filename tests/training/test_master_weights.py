"""fp32 master weights kept as bf16 weights and 16-bit remainders, and the optimizer's updates of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from armature.components.training.optimizer import CompensatedAdamW, joined, split

from .test_optimizer import HYPER, gradients

FINITE = st.floats(width=32, allow_nan=False, allow_infinity=False, min_value=-(2.0**127), max_value=2.0**127)


@given(st.lists(FINITE, min_size=1, max_size=20))
def test_split_gives_nearest_bf16_and_restores_bits(values: list[float]) -> None:
    master = torch.tensor(values, dtype=torch.float32)
    weight, low = split(master)
    assert torch.equal(joined(weight, low).view(torch.int32), master.view(torch.int32))
    exact = master.double()
    nearest = (master.to(torch.bfloat16).double() - exact).abs()
    assert torch.equal((weight.double() - exact).abs(), nearest)


def test_split_rounds_ties_away_from_zero() -> None:
    tie = torch.tensor([0x3F808000, 0x3F818000, -0x407F8000], dtype=torch.int32).view(torch.float32)
    weight, low = split(tie)
    assert torch.equal(joined(weight, low), tie)
    assert torch.all(weight.float().abs() > tie.abs())


def optimized(
    device: str = "cpu", lr: float = 1e-6, steps: int = 50, clip: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Train the same weights with two optimizers for some steps, and return both results.

    The first is the optimizer with master weights, the second is torch's AdamW in fp32.
    """
    start = torch.randn(7, 5, generator=torch.Generator().manual_seed(0)).to(device, torch.bfloat16)
    ours, theirs = nn.Parameter(start.clone()), nn.Parameter(start.float())
    ours.grad_dtype = torch.float32
    settings: dict[str, Any] = {"lr": lr}
    optimizer = CompensatedAdamW([{"params": [ours], **settings}], masters=True, **HYPER)
    stock = torch.optim.AdamW([theirs], **settings, **HYPER)
    for gradient in gradients(steps, (7, 5)):
        ours.grad, theirs.grad = gradient.to(device), gradient.to(device) * clip
        optimizer.step(clips=[clip])
        stock.step()
    state = optimizer.state[ours]
    assert state["exp_avg"].dtype == state["exp_avg_sq"].dtype == torch.float32
    return joined(ours.detach(), state["low"]), theirs.detach()


@pytest.mark.parametrize("clip", [1.0, 0.3])
def test_master_update_equals_fp32_update_bit_for_bit(clip: float) -> None:
    """Each update is about a thousandth of the last bit of most bf16 weights."""
    ours, theirs = optimized(clip=clip)
    assert torch.equal(ours, theirs)


def test_masters_optimizer_clips_fp32_parameters() -> None:
    """With FSDP shards are fp32 although the model computes in bf16, so `clips` must work on them too."""
    ours, theirs = (nn.Parameter(torch.ones(3)) for _ in range(2))
    optimizer = CompensatedAdamW([{"params": [ours], "lr": 0.1}], masters=True, betas=(0.9, 0.99), eps=1.0)
    stock = torch.optim.AdamW([theirs], lr=0.1, betas=(0.9, 0.99), eps=1.0, weight_decay=0.0)
    ours.grad, theirs.grad = torch.full((3,), 4.0), torch.full((3,), 4.0) * 0.3
    optimizer.step(clips=[0.3])
    stock.step()
    assert torch.equal(ours, theirs)


@pytest.mark.gpu
@pytest.mark.parametrize("clip", [1.0, 0.3])
def test_gpu_master_update_is_close_to_fp32_update(clip: float) -> None:
    """Both round fp32 numbers in their own order, hence the tolerance; the weights move by about 0.05."""
    ours, theirs = optimized("cuda", lr=1e-3, clip=clip)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)


def test_bf16_weight_gradients_accumulate_in_fp32() -> None:
    """A sum of a thousand ones would stop growing at 256 in bf16."""
    weight = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    weight.grad_dtype = torch.float32
    for _ in range(1000):
        (weight * 1.0).sum().backward()
    assert weight.grad is not None and weight.grad.tolist() == [1000.0] * 3
