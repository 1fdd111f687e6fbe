from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import distribute_tensor

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


@contextmanager
def one_rank() -> Iterator[DeviceMesh]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield init_device_mesh("cpu", (1,))
    finally:
        dist.destroy_process_group()


def test_a_sharded_parameter_is_updated_as_a_whole_one() -> None:
    with one_rank() as mesh:
        whole, sharded = start(torch.bfloat16), nn.Parameter(distribute_tensor(start(torch.bfloat16).data, mesh))
        optimizers = [CompensatedAdamW([{"params": [p], "lr": 1e-3}], **HYPER) for p in (whole, sharded)]
        for gradient in gradients(3, (7, 5)):
            whole.grad = gradient.bfloat16()
            sharded.grad = distribute_tensor(gradient.bfloat16(), mesh)
            for optimizer in optimizers:
                optimizer.step()
        assert torch.equal(sharded.full_tensor(), whole)


@pytest.mark.gpu
def test_on_a_gpu_the_kernel_does_what_the_plain_update_does() -> None:
    from .update_cases import both_after

    for dtype, bits in ((torch.bfloat16, 8), (torch.float16, 11)):
        kernel, plain = both_after(6, (613, 4099), dtype, "cuda")
        for ours, theirs in zip(kernel[:3], plain[:3], strict=True):
            assert (ours == theirs).float().mean() > 0.99
            # a sum that fp32 makes in another order may be rounded the other way, once in a step
            torch.testing.assert_close(ours.float(), theirs.float(), rtol=2.0**-bits, atol=6 * 2.0**-bits)
        exact = [state[0].float() + state[3].float() for state in (kernel, plain)]
        torch.testing.assert_close(*exact, rtol=0, atol=1e-4)


@pytest.mark.gpu
def test_the_optimizer_on_a_gpu_uses_the_kernel_and_keeps_its_memory() -> None:
    parameter = nn.Parameter(torch.randn(1 << 24, device="cuda").bfloat16())
    optimizer = CompensatedAdamW([{"params": [parameter], "lr": 1e-3}], **HYPER)
    for _ in range(2):
        parameter.grad = torch.randn_like(parameter)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        optimizer.step()
    assert torch.cuda.max_memory_allocated() - before < parameter.nbytes  # the plain update takes some ten times that


@pytest.mark.gpu
@pytest.mark.parametrize("masters", [False, True])
def test_parameters_on_a_gpu_are_updated_as_one_by_one(masters: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of which some have a gradient less often, and so another step."""
    from components.training import adamw_kernel

    together_at_once, update = list[int](), adamw_kernel.update

    def counting(weights: Sequence[Tensor], *others: Sequence[Tensor], **numbers: Any) -> None:
        together_at_once.append(len(weights))
        update(weights, *others, **numbers)

    together = [nn.Parameter(torch.randn(n, device="cuda").bfloat16()) for n in (5, 1000, 7, 1 << 17, 1_000_003)]
    alone = [nn.Parameter(parameter.detach().clone()) for parameter in together]
    one = CompensatedAdamW([{"params": together, "lr": 1e-2}], masters=masters, **HYPER)
    several = [CompensatedAdamW([{"params": [each], "lr": 1e-2}], masters=masters, **HYPER) for each in alone]
    for step in range(6):
        for place, (ours, theirs) in enumerate(zip(together, alone, strict=True)):
            has_gradient = place != 1 or step % 2
            gradient = torch.randn(ours.shape, device="cuda", dtype=torch.float32 if masters else torch.bfloat16)
            for parameter in (ours, theirs):
                parameter.grad_dtype = None
                parameter.grad = gradient.clone() if has_gradient else None
        with monkeypatch.context() as patched:
            patched.setattr(adamw_kernel, "update", counting)
            one.step(clips=[0.5])
        for optimizer in several:
            optimizer.step(clips=[0.5])
        for ours, theirs, optimizer in zip(together, alone, several, strict=True):
            assert torch.equal(ours, theirs)
            assert all(torch.equal(value, optimizer.state[theirs][name]) for name, value in one.state[ours].items())
    assert together_at_once == [4, 4, 1] * 3
