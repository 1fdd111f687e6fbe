"""The optimizer compared with torch's AdamW, its moving average, and the state dicts that it accepts and refuses."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import distribute_tensor

from armature.components.training.optimizer import CompensatedAdamW
from tests.refusals import refused

HYPER: dict[str, Any] = {"betas": (0.9, 0.95), "eps": 1e-6, "weight_decay": 0.1}


def gradients(steps: int, shape: tuple[int, ...]) -> list[torch.Tensor]:
    random = torch.Generator().manual_seed(1)
    return [torch.randn(shape, generator=random) for _ in range(steps)]


def start(dtype: torch.dtype) -> nn.Parameter:
    return nn.Parameter(torch.randn(7, 5, generator=torch.Generator().manual_seed(0)).to(dtype))


def test_fp32_update_equals_torch_adamw() -> None:
    ours, theirs = start(torch.float32), start(torch.float32)
    optimizer = CompensatedAdamW([{"params": [ours], "lr": 1e-2}], **HYPER)
    stock = torch.optim.AdamW([theirs], lr=1e-2, **HYPER)
    for gradient in gradients(20, (7, 5)):
        ours.grad, theirs.grad = gradient.clone(), gradient.clone()
        optimizer.step()
        stock.step()
    assert torch.equal(ours, theirs)


def test_bf16_with_residual_follows_fp32_updates() -> None:
    """At a learning rate of 1e-4 a step is below half of the last bit of a bf16 weight."""
    exact, ours, rounded = start(torch.bfloat16).float().detach(), start(torch.bfloat16), start(torch.bfloat16)
    reference = nn.Parameter(exact.clone())
    stock = torch.optim.AdamW([reference], lr=1e-4, **HYPER)
    optimizer = CompensatedAdamW([{"params": [ours], "lr": 1e-4}], **HYPER)
    plain = torch.optim.AdamW([rounded], lr=1e-4, **HYPER)
    one_way = torch.ones(7, 5)
    for _ in range(200):
        for parameter, each in ((reference, stock), (ours, optimizer), (rounded, plain)):
            parameter.grad = one_way.to(parameter.dtype)
            each.step()
    state = optimizer.state[ours]
    moved = ours.float() + state["residual"].float() - exact
    expected = reference.detach() - exact
    assert {slot: value.dtype for slot, value in state.items()} == {
        "step": torch.float32,
        "exp_avg": torch.bfloat16,
        "exp_avg_sq": torch.bfloat16,
        "residual": torch.bfloat16,
    }
    torch.testing.assert_close(moved, expected, rtol=0.1, atol=2e-5)
    assert (rounded.float() - exact).abs().mean() < 0.2 * expected.abs().mean()


def test_parameter_without_gradient_stays_unchanged() -> None:
    parameter = start(torch.float32)
    before = parameter.detach().clone()
    CompensatedAdamW([{"params": [parameter], "lr": 1.0}], **HYPER).step()
    assert torch.equal(parameter, before)


def test_averaged_sets_moving_average_and_restores_weights() -> None:
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


def updated(dtype: torch.dtype, **options: Any) -> tuple[nn.Parameter, CompensatedAdamW]:
    """Make a parameter with enough elements for 8-bit moments, and its optimizer. Return both after two updates."""
    parameter = nn.Parameter(torch.randn(70, 60, generator=torch.Generator().manual_seed(0)).to(dtype))
    parameter.grad_dtype = torch.float32 if options.get("masters") else dtype
    optimizer = CompensatedAdamW([{"params": [parameter], "lr": 1e-2}], **HYPER, **options)
    for gradient in gradients(2, (70, 60)):
        update(parameter, optimizer, gradient)
    return parameter, optimizer


def update(parameter: nn.Parameter, optimizer: torch.optim.Optimizer, gradient: Tensor) -> None:
    parameter.grad = gradient.to(parameter.grad_dtype or parameter.dtype)
    optimizer.step()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "options", [{}, {"ema_decay": 0.5}, {"masters": True}, {"states": "8bit"}, {"states": "cpu"}], ids=str
)
def test_loaded_state_continues_bit_for_bit(dtype: torch.dtype, options: dict[str, Any]) -> None:
    (one, first), (two, second) = updated(dtype, **options), updated(dtype, **options)
    second.load_state_dict(first.state_dict())
    for parameter, optimizer in ((one, first), (two, second)):
        update(parameter, optimizer, gradients(3, (70, 60))[2])
    assert torch.equal(one, two)
    for slot, value in first.state[one].items():
        assert torch.equal(value, second.state[two][slot]) and value.dtype == second.state[two][slot].dtype


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("options", [{}, {"ema_decay": 0.5}, {"masters": True}, {"states": "cpu"}], ids=str)
@pytest.mark.parametrize("assigned", [False, True])
def test_continues_state_of_torch_adamw(dtype: torch.dtype, options: dict[str, Any], assigned: bool) -> None:
    theirs = nn.Parameter(start(dtype).detach())
    stock = torch.optim.AdamW([theirs], lr=0.1, **HYPER)
    *before, after = gradients(3, (7, 5))
    for gradient in before:
        update(theirs, stock, gradient)
    ours = nn.Parameter(theirs.detach().clone())
    ours.grad_dtype = torch.float32 if options.get("masters") else dtype
    optimizer = CompensatedAdamW([{"params": [ours], "lr": 0.1}], **HYPER, **options)
    if assigned and not options.get("masters"):
        optimizer.state[ours] = {name: value.clone() for name, value in stock.state[theirs].items()}
    else:
        optimizer.load_state_dict(stock.state_dict())
    tolerance = 2**-7 if dtype == torch.bfloat16 else 0  # torch computes in bf16
    update(ours, optimizer, after)
    update(theirs, stock, after)
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)
    assert optimizer.state[ours]["step"] == 3
    if "ema_decay" in options:
        begin = theirs.detach()  # the average starts from the weights at the first update
        assert (optimizer.state[ours]["ema"] - begin.float()).abs().max() < 0.2


def foreign(make: Any, **options: Any) -> dict[str, Any]:
    parameter = start(torch.bfloat16)
    optimizer = make([parameter], lr=1e-2, **options)
    update(parameter, optimizer, gradients(1, (7, 5))[0])
    state: dict[str, Any] = optimizer.state_dict()
    return state


def counted(step: Any) -> dict[str, Any]:
    state = foreign(torch.optim.AdamW)
    state["state"][0]["step"] = step
    return state


FOREIGN: dict[str, Any] = {
    "amsgrad": lambda: foreign(torch.optim.AdamW, amsgrad=True),
    "maximize": lambda: foreign(torch.optim.AdamW, maximize=True),
    "decay in the loss": lambda: foreign(torch.optim.Adam, weight_decay=0.1),
    "sgd": lambda: foreign(torch.optim.SGD, momentum=0.9),
    "masters": lambda: updated(torch.bfloat16, masters=True)[1].state_dict(),
    "8 bits": lambda: updated(torch.bfloat16, states="8bit")[1].state_dict(),
    "sgd without momentum": lambda: foreign(torch.optim.SGD),
    "step is NaN": lambda: counted(torch.tensor(float("nan"))),
    "step is infinite": lambda: counted(float("inf")),
    "step is negative": lambda: counted(-3),
    "step is a fraction": lambda: counted(torch.tensor(2.5)),
    "step is text": lambda: counted("2"),
    "step is missing": lambda: counted(None),
    "no moment": lambda: {**foreign(torch.optim.AdamW), "state": {0: {"step": torch.tensor(1.0)}}},
}


@pytest.mark.parametrize("case", FOREIGN)
def test_rejects_state_of_other_optimizer(case: str) -> None:
    parameter = start(torch.bfloat16)
    optimizer = CompensatedAdamW([{"params": [parameter], "lr": 1e-3}], **HYPER)
    with refused("optimizer_state_mismatch") as caught:
        optimizer.load_state_dict(FOREIGN[case]())
    assert caught.value.where.startswith(("group 0", "the state of a parameter of shape [7, 5]"))
    assert not optimizer.state and optimizer.param_groups[0]["lr"] == 1e-3


@pytest.mark.parametrize("options", [{}, {"foreach": True}, {"fused": True}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_continues_groups_and_tensor_options_of_torch_adamw(dtype: torch.dtype, options: dict[str, Any]) -> None:
    def groups() -> list[dict[str, Any]]:
        parameters = [start(dtype) for _ in range(3)]
        return [{"params": parameters[:1], "lr": 0.1, "weight_decay": 0.2}, {"params": parameters[1:]}]

    stock = torch.optim.AdamW(groups(), lr=0.01, **HYPER, **options)
    optimizer = CompensatedAdamW([{"lr": 9.0, **group} for group in groups()], **HYPER)
    *before, after = gradients(3, (7, 5))
    theirs, ours = ([p for group in each.param_groups for p in group["params"]] for each in (stock, optimizer))
    for gradient in before:
        for parameter in theirs:
            parameter.grad = gradient.to(dtype)
        stock.step()
    saved = deepcopy(stock.state_dict())
    saved["param_groups"][0] |= {"lr": torch.tensor([0.1]), "betas": tuple(map(torch.tensor, HYPER["betas"]))}
    for state in saved["state"].values():
        state["step"] = int(state["step"])  # as torch before 1.12
    optimizer.load_state_dict(saved)
    for mine, other in zip(ours, theirs, strict=True):
        mine.data.copy_(other.detach())
        mine.grad = other.grad = after.to(dtype)
    optimizer.step()
    stock.step()
    tolerance = 2**-7 if dtype == torch.bfloat16 else 1e-6
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=tolerance, atol=tolerance)


@contextmanager
def one_rank() -> Iterator[DeviceMesh]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield init_device_mesh("cpu", (1,))
    finally:
        dist.destroy_process_group()


def test_sharded_update_equals_whole_update() -> None:
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
def test_gpu_kernel_matches_plain_update() -> None:
    from .update_cases import both_after

    for dtype, bits in ((torch.bfloat16, 8), (torch.float16, 11)):
        kernel, plain = both_after(6, (613, 4099), dtype, "cuda")
        for ours, theirs in zip(kernel[:3], plain[:3], strict=True):
            assert (ours == theirs).float().mean() > 0.99
            # fp32 sums in another order may round differently, once per step
            torch.testing.assert_close(ours.float(), theirs.float(), rtol=2.0**-bits, atol=6 * 2.0**-bits)
        exact = [state[0].float() + state[3].float() for state in (kernel, plain)]
        torch.testing.assert_close(*exact, rtol=0, atol=1e-4)


@pytest.mark.gpu
def test_gpu_update_needs_little_extra_memory() -> None:
    parameter = nn.Parameter(torch.randn(1 << 24, device="cuda").bfloat16())
    optimizer = CompensatedAdamW([{"params": [parameter], "lr": 1e-3}], **HYPER)
    for _ in range(2):
        parameter.grad = torch.randn_like(parameter)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        optimizer.step()
    assert torch.cuda.max_memory_allocated() - before < parameter.nbytes  # the plain update takes about ten times that


@pytest.mark.gpu
@pytest.mark.parametrize("masters", [False, True])
def test_gpu_update_of_many_parameters_equals_one_by_one(masters: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """One parameter has a gradient only in every other update, and so another step count."""
    from armature.components.training import kernels

    together_at_once, update = list[int](), kernels.update

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
            patched.setattr(kernels, "update", counting)
            one.step(clips=[0.5])
        for optimizer in several:
            optimizer.step(clips=[0.5])
        for ours, theirs, optimizer in zip(together, alone, several, strict=True):
            assert torch.equal(ours, theirs)
            assert all(torch.equal(value, optimizer.state[theirs][name]) for name, value in one.state[ours].items())
    assert together_at_once == [4, 4, 1] * 3
