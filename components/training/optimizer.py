"""AdamW for fp32 and bf16 weights that does not lose small updates to bf16's rounding, with optional weight averaging.

A bf16 weight has 8 significant bits, so an update much smaller than the weight would round to nothing. The optimizer
therefore keeps the rounding error beside the weight: in bf16 (a residual), or as the lower half of an fp32 master.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw
from torch.optim.swa_utils import get_ema_multi_avg_fn

from armature.components.contracts.errors import DataError
from armature.components.models.context_parallel import to_device
from armature.components.training.optimizer_state import (
    FIRST,
    LOW,
    RESIDUAL,
    SCALES,
    SECOND,
    STORAGES,
    OptimizerStates,
    State,
    kernels,
    local_tensor,
    miscount,
    misfit,
    on_gpu,
)
from armature.components.training.sharded_tensors import TensorSpec

STEP, EMA = "step", "ema"
COMPLETED = {RESIDUAL, LOW, EMA}
"""State slots that torch's AdamW does not have. If a loaded state lacks them, they are initialized."""
_HALF = 0x8000
"""Half of a bf16 number's unit in the last place, as an integer to add to an fp32 number's bit pattern."""


class CompensatedAdamW(torch.optim.Optimizer):
    """AdamW for parameters in fp32 and bf16.

    An fp32 parameter is updated as torch's AdamW does. A bf16 parameter has bf16 moments and a bf16 residual: the part
    of the weight that rounding cut off, so that weight + residual moves by the fp32 update.

    Args:
        groups: parameter groups with `params`, `lr` and optionally `weight_decay`.
        masters: for bf16 parameters, keep fp32 moments and the lower 16 bits of fp32 master weights, so that updates
            are bit for bit the same as for fp32 weights; see `split`.
        states: where and in which format states are kept between updates; see
            `armature.components.training.optimizer_state`.
        ema_decay: also keep the moving average e <- decay * e + (1 - decay) * weight in fp32, starting from the weights
            at the first update. Needs `states="device"`.

    Example:
        >>> weight = nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
        >>> optimizer = CompensatedAdamW([{"params": [weight], "lr": 1e-4}], betas=(0.9, 0.999), eps=1e-8)
        >>> weight.grad = torch.ones_like(weight)
        >>> optimizer.step()  # bf16 has no number between 0.996 and 1, so the update goes to the residual
        >>> weight.item(), round(optimizer.state[weight]["residual"].item(), 6)
        (1.0, -0.0001)
    """

    def __init__(
        self,
        groups: Iterable[Mapping[str, Any]],
        *,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float = 0.0,
        masters: bool = False,
        states: OptimizerStates = "device",
        ema_decay: float | None = None,
    ) -> None:
        assert ema_decay is None or states == "device"
        self.masters, self.ema_decay, self._storage = masters, ema_decay, STORAGES[states]()
        self._average = get_ema_multi_avg_fn(ema_decay) if ema_decay is not None else None
        super().__init__([dict(g) for g in groups], {"betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None, *, clips: Sequence[float] | None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient.

        Args:
            clips: one factor per parameter group. The group's gradients are first multiplied by it; None leaves all
                gradients unchanged.
        """
        for group, clip in zip(self.param_groups, clips or [1.0] * len(self.param_groups), strict=True):
            trained = [p for p in group["params"] if p.grad is not None]
            for parameter in trained:
                self._complete(parameter, self.state[parameter])
            for parameters, states in self._storage.at_work(trained, [self.state[p] for p in trained]):
                pairs = list(zip(parameters, states, strict=True))
                self._step_fp32([pair for pair in pairs if pair[0].dtype == torch.float32], group, clip)
                for together in _grouped([pair for pair in pairs if pair[0].dtype != torch.float32]):
                    self._step_rounded(together, group, clip)
            if self._average is not None and trained:
                averages = [self.state[p][EMA] for p in trained]
                self._average(averages, [self._exact(p) for p in trained], torch.tensor(1))

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state dict saved by this class or by torch's AdamW.

        torch's own method would cast each state to the dtype of its weight, which rounds fp32 moments and averages.

        Raises:
            DataError: an option or a state does not fit; the optimizer is then unchanged.
        """
        for number, group in enumerate(state_dict["param_groups"]):
            decay = group.get("weight_decay", 0) if group.get("decoupled_weight_decay") is False else 0
            options = {name: group.get(name) for name in ("amsgrad", "maximize")} | {"weight_decay in the loss": decay}
            faults = [f"{name} = {value} is not supported" for name, value in options.items() if value]
            faults += [f"{name} is missing" for name in ("lr", *self.defaults) if name not in group]
            if faults:
                raise _misfits(f"group {number}", faults)
        trained = [p for group in self.param_groups for p in group["params"]]
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        states = {
            parameter: self._converted(parameter, saved)
            for parameter, number in zip(trained, numbers, strict=False)  # torch checks the groups' lengths below
            if (saved := state_dict["state"].get(number))
        }
        groups = [
            {**group, "lr": float(group["lr"]), "betas": tuple(map(float, group["betas"]))}  # torch allows tensors
            for group in state_dict["param_groups"]
        ]
        super().load_state_dict({**state_dict, "param_groups": groups, "state": {}})
        self.state.update(states)

    def slots(self, parameter: nn.Parameter) -> dict[str, TensorSpec]:
        """Return shape and dtype of each state tensor that is kept for an updated parameter, by slot name."""
        shape, rounded = parameter.shape, parameter.dtype != torch.float32
        moment = TensorSpec(shape, torch.float32 if self.masters else parameter.dtype)
        slots = {STEP: TensorSpec(torch.Size(()), torch.float32), FIRST: moment, SECOND: moment}
        if rounded and self.masters:
            slots[LOW] = TensorSpec(shape, torch.int16)
        elif rounded:
            slots[RESIDUAL] = moment
        if self.ema_decay is not None:
            slots[EMA] = TensorSpec(shape, torch.float32)
        return self._storage.slots(slots)

    def empty_slot(self, parameter: nn.Parameter, slot: str, spec: TensorSpec) -> Tensor:
        """Return an uninitialized tensor for one slot of `parameter`, on the device where the optimizer keeps it."""
        if slot == STEP:
            return torch.empty(spec.shape, dtype=spec.dtype)
        return self._storage.empty(parameter.detach(), slot, spec)

    @contextmanager
    def averaged(self) -> Any:
        """Set the parameters to their moving averages within a `with` block.

        Parameters without an average, because they were never updated or `ema_decay` is None, stay as they are.
        """
        trained = {p: p.detach().clone() for p in self.state if EMA in self.state[p]}
        with torch.no_grad():
            for parameter in trained:
                parameter.copy_(self.state[parameter][EMA])
        try:
            yield
        finally:
            with torch.no_grad():
                for parameter, value in trained.items():
                    parameter.copy_(value)

    def _complete(self, parameter: nn.Parameter, state: State) -> None:
        """Add missing slots to a parameter's `state`, with the values that they have before the first update.

        A state of torch's AdamW has no residual for a bf16 weight. What its rounding cut off is lost, so a residual of
        0 is exact.
        """
        for name, spec in self.slots(parameter).items():
            if name not in state:
                state[name] = self.empty_slot(parameter, name, spec).zero_()
                if name == EMA:
                    state[name].copy_(parameter)

    def _converted(self, parameter: nn.Parameter, saved: Mapping[str, Any]) -> State:
        """Copy the saved state of a parameter into tensors for the slots of this optimizer."""
        slots, state = self.slots(parameter), dict[str, Tensor]()
        faults = [f"{name} is unknown here" for name in saved.keys() - slots.keys()]
        faults += [f"{name} is missing" for name in slots.keys() - saved.keys() - COMPLETED]
        for name in slots.keys() & saved.keys():
            if not isinstance(saved[name], Tensor | float | int):
                faults.append(f"{name} is a {type(saved[name]).__name__}")
                continue
            value = torch.as_tensor(saved[name], dtype=torch.float32 if name == STEP else None)
            fault = misfit(TensorSpec(value.shape, value.dtype), slots[name])
            if fault := fault or (miscount(value) if name == STEP else ""):
                faults.append(f"{name} {fault}")
            else:
                state[name] = self.empty_slot(parameter, name, slots[name]).copy_(value)
        if faults:
            raise _misfits(f"the state of a parameter of shape {list(parameter.shape)}", sorted(faults))
        self._complete(parameter, state)
        return state

    def _exact(self, parameter: nn.Parameter) -> Tensor:
        """Return the exact value of `parameter` in fp32: the bf16 weight and the part that rounding cut off."""
        state = self.state[parameter]
        if LOW in state:
            return joined(parameter.detach(), state[LOW])
        return parameter.float() + state[RESIDUAL].float() if RESIDUAL in state else parameter.detach()

    def _step_fp32(self, pairs: Sequence[tuple[nn.Parameter, State]], group: Mapping[str, Any], clip: float) -> None:
        if pairs and clip != 1:
            torch._foreach_mul_([local_tensor(p.grad) for p, _ in pairs if p.grad is not None], clip)
        self._update(pairs, [local_tensor(p).detach() for p, _ in pairs], group)

    def _update(
        self, pairs: Sequence[tuple[nn.Parameter, State]], weights: list[Tensor], group: Mapping[str, Any]
    ) -> None:
        """Apply torch's AdamW in place to `weights`, the fp32 values of the parameters."""
        if not pairs:
            return
        states = [state for _, state in pairs]
        beta1, beta2 = group["betas"]
        fused = all(weight.is_cuda for weight in weights)
        counts = [s[STEP] for s in states]
        if fused:
            counts = list(to_device(torch.stack(counts), weights[0].device).unbind())
        adamw(
            weights,
            [local_tensor(p.grad) for p, _ in pairs if p.grad is not None],
            [local_tensor(s[FIRST]) for s in states],
            [local_tensor(s[SECOND]) for s in states],
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

    def _step_rounded(self, pairs: Sequence[tuple[nn.Parameter, State]], group: Mapping[str, Any], clip: float) -> None:
        """Update bf16 parameters that `_grouped` put together, with the options of their parameter group `group`."""
        rest = LOW if self.masters else RESIDUAL
        tensors = [
            tuple(map(local_tensor, (parameter.detach(), parameter.grad, state[FIRST], state[SECOND], state[rest])))
            for parameter, state in pairs
            if parameter.grad is not None
        ]
        weight, *others = tensors[0]
        fused = on_gpu(weight)
        if self.masters and not fused:
            others[0].mul_(clip)
            master = joined(weight, others[-1])
            self._update(pairs, [master], group)
            for target, half in zip((weight, others[-1]), split(master), strict=True):
                target.copy_(half)
            return
        numbers = {
            "rate": group["lr"],
            "decay": group["weight_decay"],
            "betas": group["betas"],
            "eps": group["eps"],
            "step": int(pairs[0][1][STEP].item()) + 1,
            "clip": clip,
        }
        if fused:
            scales = None
            if others[1].dtype == torch.uint8:
                scales = [[state[slot + SCALES] for _, state in pairs] for slot in (FIRST, SECOND)]
            kernels().update(*zip(*tensors, strict=True), **numbers, scales=scales)
        else:
            rounded_update(weight, *others, **numbers)
        torch._foreach_add_([state[STEP] for _, state in pairs], 1)


def joined(weight: Tensor, low: Tensor) -> Tensor:
    """Return the fp32 weights whose upper and lower halves are `weight` (bf16) and `low` (int16), of the same shape.

    Example:
        >>> joined(*split(torch.tensor([0.1]))).item() == torch.tensor([0.1]).item()
        True
    """
    return ((weight.view(torch.int16).int() << 16) + low.int()).view(torch.float32)


def split(master: Tensor) -> tuple[Tensor, Tensor]:
    """Split fp32 numbers into the nearest bf16 numbers and an int16 remainder, from which `joined` restores them.

    Ties round away from zero, because then the remainder fits into 16 bits.
    """
    bits = master.view(torch.int32)
    high = (bits + _HALF) >> 16
    return high.short().view(torch.bfloat16), (bits - (high << 16)).short()


def rounded_update(
    weight: Tensor,
    gradient: Tensor,
    first: Tensor,
    second: Tensor,
    residual: Tensor,
    *,
    rate: float,
    decay: float,
    betas: tuple[float, float],
    eps: float,
    step: int,
    clip: float = 1.0,
) -> None:
    """Make one AdamW update of weight + residual in fp32, in place for all tensors but the gradient.

    Args:
        decay: decoupled weight decay.
        step: the number of this update, from 1, for the bias correction.
        clip: factor on the gradient.
    """
    beta1, beta2 = betas
    gradient = gradient.float() * clip
    m = first.float().lerp_(gradient, 1 - beta1)
    v = second.float().mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
    exact = (weight.float() + residual.float()).mul_(1 - rate * decay)
    spread = (v / (1 - beta2**step)).sqrt_().add_(eps)
    exact.addcdiv_(m, spread, value=-rate / (1 - beta1**step))
    first.copy_(m)
    second.copy_(v)
    weight.copy_(exact)
    residual.copy_(exact - weight.float())


def _grouped(pairs: Sequence[tuple[nn.Parameter, State]]) -> Collection[list[tuple[nn.Parameter, State]]]:
    """Divide parameters (each with its state) into groups that one launch of the Triton kernel can update.

    A parameter that the kernel cannot update is a group of its own. All parameters must have gradients.
    """
    groups = defaultdict[Hashable, list[tuple[nn.Parameter, State]]](list)
    for place, (parameter, state) in enumerate(pairs):
        assert parameter.grad is not None
        fused = on_gpu(local_tensor(parameter.detach()))
        key = (parameter.dtype, parameter.grad.dtype, state[STEP].item()) if fused else place
        groups[key].append((parameter, state))
    return groups.values()


def _misfits(where: str, faults: Sequence[str]) -> DataError:
    return DataError(
        f"the optimizer's state cannot be loaded: {'; '.join(faults)}",
        code="optimizer_state_mismatch",
        where=where,
        remedy="load a state saved by this optimizer or by torch's AdamW, with weights of the same dtypes",
    )
