"""The tensors of a checkpoint: those of the weights, and those that the optimizer keeps for each of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from components.contracts.errors import DataError
from components.training.ranks import like, whole

Optimizer = torch.optim.Optimizer


@dataclass(frozen=True)
class OptimizerStateSpec:
    """What an optimizer keeps under one name."""

    shape: torch.Size
    dtype: torch.dtype


def slots_of(optimizer: Optimizer, parameter: nn.Parameter) -> dict[str, OptimizerStateSpec]:
    """What `optimizer`, torch's AdamW or one that says so itself, keeps for a parameter that it has updated."""
    if own := getattr(optimizer, "slots", None):
        slots: dict[str, OptimizerStateSpec] = own(parameter)
        return slots
    moment = OptimizerStateSpec(parameter.shape, parameter.dtype)
    return {"step": OptimizerStateSpec(torch.Size(()), torch.float32), "exp_avg": moment, "exp_avg_sq": moment}


def optimizer_tensors(optimizer: Optimizer, trained: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    """All that `optimizer` keeps, as "<parameter>|<slot>". Every rank calls it."""
    return {
        f"{name}|{slot}": whole(value).contiguous()
        for name, parameter in trained.items()
        for slot, value in optimizer.state[parameter].items()
    }


def checked_weights(found: Mapping[str, Tensor], trained: Mapping[str, nn.Parameter], where: Path) -> dict[str, Tensor]:
    """`found`, if it is what is trained.

    Raises:
        DataError: other names, shapes, types or values than weights can have.
    """
    _same_names("names of weights", set(trained), set(found), where)
    return {
        name: _checked(found[name], OptimizerStateSpec(p.shape, p.dtype), name, where) for name, p in trained.items()
    }


def checked_state(
    found: Mapping[str, Tensor], optimizer: Optimizer, trained: Mapping[str, nn.Parameter], where: Path
) -> dict[str, dict[str, Tensor]]:
    """What `optimizer_tensors` gave, by parameter; nothing for one that was never updated.

    Lower precision than the optimizer's is converted: AdamW of torch keeps moments of bf16 beside weights of bf16.

    Raises:
        DataError: the state of another optimizer or of other parameters, or values that no update leaves behind.
    """
    given: dict[str, dict[str, Tensor]] = {}
    for key, value in found.items():
        name, _, slot = key.rpartition("|")
        given.setdefault(name, {})[slot] = value
    if strange := sorted(given.keys() - trained.keys()):
        raise _refusal(f"there is state for {_few(strange)}, which nothing here trains", where)
    checked = {}
    for name, values in given.items():
        slots = slots_of(optimizer, trained[name])
        _same_names(f"slots of {name}", set(slots), set(values), where)
        checked[name] = {
            slot: _checked(values[slot], wanted, f"{name}|{slot}", where) for slot, wanted in slots.items()
        }
        count = checked[name]["step"].item()
        if count < 1 or count != int(count):
            raise _refusal(f"{name}|step is {count}, not a number of updates", where)
    return checked


def restore_state(
    optimizer: Optimizer, trained: Mapping[str, nn.Parameter], state: Mapping[str, Mapping[str, Tensor]]
) -> None:
    """Give `optimizer` its checked state: moments laid out like their parameter, counts on the CPU."""
    for name, parameter in trained.items():
        optimizer.state[parameter] = {
            slot: value if slot == "step" else like(value, parameter.detach().to(value.dtype))
            for slot, value in state.get(name, {}).items()
        }


def _checked(value: Tensor, wanted: OptimizerStateSpec, name: str, where: Path) -> Tensor:
    if value.shape != wanted.shape:
        raise _refusal(f"{name} has shape {list(value.shape)}, {list(wanted.shape)} is needed", where)
    if value.is_complex() or torch.promote_types(value.dtype, wanted.dtype) != wanted.dtype:
        raise _refusal(f"{name} is {value.dtype}, which does not fit into {wanted.dtype}", where)
    if not torch.isfinite(value).all():
        raise _refusal(f"{name} has values that are not finite", where)
    return value.to(wanted.dtype)


def _same_names(what: str, wanted: set[str], found: set[str], where: Path) -> None:
    missing, strange = sorted(wanted - found), sorted(found - wanted)
    if missing or strange:
        parts = [f"{_few(missing)} missing" if missing else "", f"{_few(strange)} not known here" if strange else ""]
        raise _refusal(f"the {what} do not fit: {', '.join(part for part in parts if part)}", where)


def _few(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def _refusal(what: str, where: Path) -> DataError:
    remedy = "use a checkpoint that this training wrote: delete this folder, and the one before it is used"
    return DataError(f"the checkpoint cannot be resumed from: {what}", where=str(where), remedy=remedy)
