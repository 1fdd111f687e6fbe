"""What an optimizer keeps for each parameter, as named tensors of a checkpoint."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from armature.components.contracts.errors import DataError
from armature.components.training.sharded_tensors import TensorSpec

Optimizer = torch.optim.Optimizer
Parameters = Mapping[str, nn.Parameter]
WEIGHT, STATE = "weight/", "optimizer/"
"""What names in a checkpoint begin with: weight/<parameter> and optimizer/<parameter>|<slot>."""


def slots_of(optimizer: Optimizer, parameter: nn.Parameter) -> dict[str, TensorSpec]:
    """What `optimizer`, torch's AdamW or one that says so itself, keeps for a parameter that it has updated."""
    if own := getattr(optimizer, "slots", None):
        slots: dict[str, TensorSpec] = own(parameter)
        return slots
    moment = TensorSpec(parameter.shape, parameter.dtype)
    return {"step": TensorSpec(torch.Size(()), torch.float32), "exp_avg": moment, "exp_avg_sq": moment}


def state_tensors(optimizer: Optimizer, trained: Parameters) -> dict[str, Tensor]:
    """The weights and all that `optimizer` keeps, laid out as they are."""
    tensors = {WEIGHT + name: parameter.detach() for name, parameter in trained.items()}
    for name, parameter in trained.items():
        tensors |= {f"{STATE}{name}|{slot}": value for slot, value in optimizer.state[parameter].items()}
    return tensors


def empty_state(
    found: Mapping[str, TensorSpec], optimizer: Optimizer, trained: Parameters, where: Path
) -> dict[str, dict[str, Tensor]]:
    """By parameter, tensors to read its slots into, laid out like the parameter; none for one never updated.

    Lower precision than the optimizer's is converted: AdamW of torch keeps moments of bf16 beside weights of bf16.

    Raises:
        DataError: the weights or the state of another model or optimizer.
    """
    weights = {name.removeprefix(WEIGHT) for name in found if name.startswith(WEIGHT)}
    _same_names("names of weights", set(trained), weights, where)
    for name, parameter in trained.items():
        _refuse_misfit(found[WEIGHT + name], TensorSpec(parameter.shape, parameter.dtype), name, where)
    kept: dict[str, set[str]] = {}
    for key in found:
        if key.startswith(STATE):
            name, _, slot = key.removeprefix(STATE).rpartition("|")
            kept.setdefault(name, set()).add(slot)
    if unknown := sorted(kept.keys() - trained.keys()):
        raise refusal(f"there is state for {_few(unknown)}, which nothing here trains", where)
    state = {}
    for name, slots in kept.items():
        wanted = slots_of(optimizer, trained[name])
        _same_names(f"slots of {name}", set(wanted), slots, where)
        for slot, spec in wanted.items():
            _refuse_misfit(found[f"{STATE}{name}|{slot}"], spec, f"{name}|{slot}", where)
        state[name] = {slot: _empty(optimizer, trained[name], slot, spec) for slot, spec in wanted.items()}
    return state


def refuse_counts(counts: Iterable[tuple[str, Tensor]], where: Path) -> None:
    """
    Raises:
        DataError: a slot "step" that no number of updates leaves behind.
    """
    for name, count in counts:
        if fault := miscount(count):
            raise refusal(f"{name}|step {fault}", where)


def miscount(count: Tensor) -> str:
    """Say why no number of updates leaves this slot "step" behind; empty if one does."""
    number = count.item()
    return "" if number >= 1 and number % 1 == 0 else f"is {number}, not a number of updates"  # NaN compares false


def misfit(found: TensorSpec, wanted: TensorSpec) -> str:
    """Say why a saved tensor cannot be read into the wanted one; empty if it can, without a loss of precision."""
    if found.shape != wanted.shape:
        return f"has shape {list(found.shape)}, {list(wanted.shape)} is needed"
    if found.dtype.is_complex or torch.promote_types(found.dtype, wanted.dtype) != wanted.dtype:
        return f"is {found.dtype}, which does not fit into {wanted.dtype}"
    return ""


def refusal(what: str, where: Path) -> DataError:
    """A checkpoint that does not fit."""
    remedy = "use a checkpoint that this training wrote: delete this folder, and the one before it is used"
    return DataError(
        f"the checkpoint cannot be resumed from: {what}", code="checkpoint_mismatch", where=str(where), remedy=remedy
    )


def _empty(optimizer: Optimizer, parameter: nn.Parameter, slot: str, spec: TensorSpec) -> Tensor:
    """Where the optimizer says, else moments lie like their parameter, counts on the CPU."""
    if own := getattr(optimizer, "empty_slot", None):
        made: Tensor = own(parameter, slot, spec)
        return made
    if slot == "step":
        return torch.empty(spec.shape, dtype=spec.dtype)
    return torch.empty_like(parameter.detach(), dtype=spec.dtype)


def _refuse_misfit(found: TensorSpec, wanted: TensorSpec, name: str, where: Path) -> None:
    if fault := misfit(found, wanted):
        raise refusal(f"{name} {fault}", where)


def _same_names(what: str, wanted: set[str], found: set[str], where: Path) -> None:
    missing, unknown = sorted(wanted - found), sorted(found - wanted)
    if missing or unknown:
        parts = [f"{_few(missing)} missing" if missing else "", f"{_few(unknown)} not known here" if unknown else ""]
        raise refusal(f"the {what} do not fit: {', '.join(part for part in parts if part)}", where)


def _few(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
