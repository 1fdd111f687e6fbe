from __future__ import annotations

from typing import Any

import torch
from torch import nn

from components.training.optimizer import CompensatedAdamW

HYPER: dict[str, Any] = {"betas": (0.9, 0.95), "eps": 1e-6, "weight_decay": 0.1}


def gradients(steps: int, shape: tuple[int, ...]) -> list[torch.Tensor]:
    random = torch.Generator().manual_seed(1)
    return [torch.randn(shape, generator=random) for _ in range(steps)]


def start(dtype: torch.dtype) -> nn.Parameter:
    return nn.Parameter(torch.randn(7, 5, generator=torch.Generator().manual_seed(0)).to(dtype))


def test_fp32_is_updated_as_torch_does_it_to_the_bit() -> None:
    ours, theirs = start(torch.float32), start(torch.float32)
    optimizer = CompensatedAdamW([{"params": [ours], "lr": 1e-2}], **HYPER)
    stock = torch.optim.AdamW([theirs], lr=1e-2, **HYPER)
    for gradient in gradients(20, (7, 5)):
        ours.grad, theirs.grad = gradient.clone(), gradient.clone()
        optimizer.step()
        stock.step()
    assert torch.equal(ours, theirs)


def test_bf16_follows_the_fp32_updates_that_plain_rounding_loses() -> None:
    """At a learning rate of 1e-4 a step is below half of the last bit of a bf16 weight."""
    exact, kept, rounded = start(torch.bfloat16).float().detach(), start(torch.bfloat16), start(torch.bfloat16)
    reference = nn.Parameter(exact.clone())
    stock = torch.optim.AdamW([reference], lr=1e-4, **HYPER)
    optimizer = CompensatedAdamW([{"params": [kept], "lr": 1e-4}], **HYPER)
    plain = torch.optim.AdamW([rounded], lr=1e-4, **HYPER)
    one_way = torch.ones(7, 5)
    for _ in range(200):
        for parameter, each in ((reference, stock), (kept, optimizer), (rounded, plain)):
            parameter.grad = one_way.to(parameter.dtype)
            each.step()
    state = optimizer.state[kept]
    moved = kept.float() + state["residual"].float() - exact
    expected = reference.detach() - exact
    assert {slot: value.dtype for slot, value in state.items()} == {
        "step": torch.float32,
        "exp_avg": torch.bfloat16,
        "exp_avg_sq": torch.bfloat16,
        "residual": torch.bfloat16,
    }
    torch.testing.assert_close(moved, expected, rtol=0.1, atol=2e-5)
    assert (rounded.float() - exact).abs().mean() < 0.2 * expected.abs().mean()


def test_a_parameter_without_a_gradient_is_left_alone() -> None:
    parameter = start(torch.float32)
    before = parameter.detach().clone()
    CompensatedAdamW([{"params": [parameter], "lr": 1.0}], **HYPER).step()
    assert torch.equal(parameter, before)


def test_the_average_is_that_of_the_weights_and_goes_again() -> None:
    parameter = start(torch.float32)
    optimizer = CompensatedAdamW([{"params": [parameter], "lr": 1e-2}], ema_decay=0.8, **HYPER)
    average = parameter.detach().clone()
    for gradient in gradients(5, (7, 5)):
        parameter.grad = gradient
        optimizer.step()
        average = 0.8 * average + 0.2 * parameter.detach()
    trained = parameter.detach().clone()
    with optimizer.averaged():
        torch.testing.assert_close(parameter.detach(), average)
    assert torch.equal(parameter, trained)
