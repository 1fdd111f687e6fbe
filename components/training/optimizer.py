"""AdamW that loses no small update to the 8 bits of a bf16 weight, and an average of the weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw
from torch.optim.swa_utils import get_ema_multi_avg_fn

from components.training.master_weights import joined, split
from components.training.sharded_tensors import TensorSpec

FIRST, SECOND, STEP, RESIDUAL, LOW, EMA = "exp_avg", "exp_avg_sq", "step", "residual", "low", "ema"
_MASTERS_AT_ONCE = 2**27
"""Weights of which the fp32 form exists at the same time, unless one parameter has more."""


class CompensatedAdamW(torch.optim.Optimizer):
    """AdamW over parameters of fp32 and bf16.

    Those of fp32 are updated as torch's AdamW does. Of one in bf16 both moments are bf16, and what rounding takes
    from the weight is kept beside it in bf16, so that weight + residual moves by the fp32 update.

    Args:
        groups: each with `params` and `lr`, and a `weight_decay` of its own if it has one.
        masters: of one in bf16 the moments are fp32, and all that rounding takes from the weight is kept, so that the
            update is the one of an fp32 weight, bit for bit; see `components.training.master_weights`.
        ema_decay: also keep e <- decay * e + (1 - decay) * weight in fp32, from the weights at the first update on.
    """

    def __init__(
        self,
        groups: Iterable[Mapping[str, Any]],
        *,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float = 0.0,
        masters: bool = False,
        ema_decay: float | None = None,
    ) -> None:
        self.masters, self.ema_decay = masters, ema_decay
        self._average = get_ema_multi_avg_fn(ema_decay) if ema_decay is not None else None
        super().__init__([dict(g) for g in groups], {"betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One update of every parameter that has a gradient."""
        for group in self.param_groups:
            trained = [p for p in group["params"] if p.grad is not None]
            for parameter in trained:
                self._prepare(parameter)
            self._step_fp32([p for p in trained if p.dtype == torch.float32], group)
            rounded = [p for p in trained if p.dtype != torch.float32]
            if self.masters:
                self._step_masters(rounded, group)
            else:
                for parameter in rounded:
                    self._step_rounded(parameter, group)
            if self._average is not None and trained:
                averages = [self.state[p][EMA] for p in trained]
                self._average(averages, [self._exact(p) for p in trained], torch.tensor(1))

    def slots(self, parameter: nn.Parameter) -> dict[str, TensorSpec]:
        """What is kept for a parameter that was updated; see `components.training.optimizer_state`."""
        shape, rounded = parameter.shape, parameter.dtype != torch.float32
        moment = TensorSpec(shape, torch.float32 if self.masters else parameter.dtype)
        slots = {STEP: TensorSpec(torch.Size(()), torch.float32), FIRST: moment, SECOND: moment}
        if rounded and self.masters:
            slots[LOW] = TensorSpec(shape, torch.int16)
        elif rounded:
            slots[RESIDUAL] = moment
        if self.ema_decay is not None:
            slots[EMA] = TensorSpec(shape, torch.float32)
        return slots

    @contextmanager
    def averaged(self) -> Any:
        """Within it the parameters have the averages; those never updated, and all where there is none, are as is."""
        kept = {p: p.detach().clone() for p in self.state if EMA in self.state[p]}
        with torch.no_grad():
            for parameter in kept:
                parameter.copy_(self.state[parameter][EMA])
        try:
            yield
        finally:
            with torch.no_grad():
                for parameter, value in kept.items():
                    parameter.copy_(value)

    def _prepare(self, parameter: nn.Parameter) -> None:
        state = self.state[parameter]
        if FIRST in state:
            return
        for name, slot in self.slots(parameter).items():
            state[name] = torch.zeros_like(parameter, memory_format=torch.preserve_format, dtype=slot.dtype)
        state[STEP] = torch.tensor(0.0)
        if EMA in state:
            state[EMA].copy_(parameter)

    def _exact(self, parameter: nn.Parameter) -> Tensor:
        """The weight in fp32, with what rounding took from it."""
        state = self.state[parameter]
        if LOW in state:
            return _fast(joined, parameter)(parameter.detach(), state[LOW])
        return parameter.float() + state[RESIDUAL].float() if RESIDUAL in state else parameter.detach()

    def _step_fp32(self, parameters: list[nn.Parameter], group: Mapping[str, Any]) -> None:
        self._update(parameters, [_local(p.detach()) for p in parameters], group)

    def _step_masters(self, parameters: list[nn.Parameter], group: Mapping[str, Any]) -> None:
        for some in _portions(parameters):
            masters = [self._exact(parameter) for parameter in some]
            self._update(some, masters, group)
            for parameter, master in zip(some, masters, strict=True):
                weight, low = _fast(split, parameter)(master)
                parameter.copy_(weight)
                self.state[parameter][LOW].copy_(low)

    def _update(self, parameters: list[nn.Parameter], weights: list[Tensor], group: Mapping[str, Any]) -> None:
        """AdamW on `weights`, the fp32 values of `parameters`, in place."""
        if not parameters:
            return
        states = [self.state[p] for p in parameters]
        beta1, beta2 = group["betas"]
        fused = all(weight.is_cuda for weight in weights)
        counts = [s[STEP] for s in states]
        if fused:
            counts = list(torch.stack(counts).to(weights[0].device).unbind())
        adamw(
            weights,
            [_local(p.grad) for p in parameters if p.grad is not None],
            [_local(s[FIRST]) for s in states],
            [_local(s[SECOND]) for s in states],
            [],
            counts,
            fused=fused,
            foreach=False,
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )
        if fused:
            for state in states:
                state[STEP] += 1

    def _step_rounded(self, parameter: nn.Parameter, group: Mapping[str, Any]) -> None:
        assert parameter.grad is not None
        state, gradient = self.state[parameter], parameter.grad.float()
        beta1, beta2 = group["betas"]
        state[STEP] += 1
        count = state[STEP].item()
        first = state[FIRST].float().lerp_(gradient, 1 - beta1)
        second = state[SECOND].float().mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        exact = self._exact(parameter).mul_(1 - group["lr"] * group["weight_decay"])
        spread = (second / (1 - beta2**count)).sqrt_().add_(group["eps"])
        exact.addcdiv_(first, spread, value=-group["lr"] / (1 - beta1**count))
        state[FIRST].copy_(first)
        state[SECOND].copy_(second)
        parameter.copy_(exact)
        state[RESIDUAL].copy_(exact - parameter.float())


def _portions(parameters: Iterable[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """The parameters, at most `_MASTERS_AT_ONCE` weights at a time."""
    some: list[nn.Parameter] = []
    for parameter in parameters:
        if some and sum(p.numel() for p in some) + parameter.numel() > _MASTERS_AT_ONCE:
            yield some
            some = []
        some.append(parameter)
    if some:
        yield some


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _fast(function: Callable[..., Any], parameter: nn.Parameter) -> Callable[..., Any]:
    """`function`, of elements, as one kernel where the parameter is on a GPU."""
    return _compiled(function) if parameter.is_cuda else function


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, dynamic=True)
