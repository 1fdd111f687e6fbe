"""AdamW's states of a parameter: how they lie between updates, and as named tensors of a checkpoint.

Between updates they are as they are, in main memory, or in 8 bits. The arithmetic of an update knows nothing of it: a
storage lends it each parameter's states as plain tensors on the parameter's device and takes them back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from armature.components.contracts.errors import DataError
from armature.components.models.blockwise import SIGNED, UNSIGNED
from armature.components.training.sharded_tensors import TensorSpec

OptimizerStates = Literal["device", "cpu", "8bit"]
State = dict[str, Tensor]
Slots = Mapping[str, TensorSpec]
Lent = tuple[Sequence[nn.Parameter], Sequence[State]]
FIRST, SECOND, RESIDUAL, LOW = "exp_avg", "exp_avg_sq", "residual", "low"
SMALL = 4096
"""Parameters with fewer numbers, such as norms, have their states as they are."""
MOVED = frozenset({FIRST, SECOND, RESIDUAL, LOW})
CODES = {FIRST: SIGNED, SECOND: UNSIGNED}
SCALES = "_scales"
"""exp_avg_scales: of the blocks of exp_avg in 8 bits."""

Optimizer = torch.optim.Optimizer
Parameters = Mapping[str, nn.Parameter]
WEIGHT, STATE = "weight/", "optimizer/"
"""What names in a checkpoint begin with: weight/<parameter> and optimizer/<parameter>|<slot>."""


class Storage(Protocol):
    def slots(self, plain: Slots) -> dict[str, TensorSpec]:
        """What is kept of a parameter whose states would be `plain`."""
        ...

    def empty(self, parameter: Tensor, slot: str, spec: TensorSpec) -> Tensor:
        """One of them, with any numbers."""
        ...

    def at_work(self, parameters: Sequence[nn.Parameter], kept: Sequence[State]) -> Iterator[Lent]:
        """Parameters in groups, each with its states to be changed in place until the next group is asked for."""
        ...


class OnDevice:
    """All of them beside their parameters."""

    def slots(self, plain: Slots) -> dict[str, TensorSpec]:
        return dict(plain)

    def empty(self, parameter: Tensor, slot: str, spec: TensorSpec) -> Tensor:
        return torch.empty_like(parameter, dtype=spec.dtype)

    def at_work(self, parameters: Sequence[nn.Parameter], kept: Sequence[State]) -> Iterator[Lent]:
        yield parameters, kept


class InMainMemory(OnDevice):
    """In main memory, pinned for a GPU, which has the states of at most three parameters at once.

    The update is computed by the GPU as it would be otherwise, so that it is the same bits. While one parameter is
    updated, the states of the next are copied there and those of the last one back, in streams of their own.
    """

    def empty(self, parameter: Tensor, slot: str, spec: TensorSpec) -> Tensor:
        if parameter.numel() < SMALL:
            return super().empty(parameter, slot, spec)
        pinned = _local(parameter).is_cuda
        return torch.empty_like(parameter, dtype=spec.dtype, device="cpu", pin_memory=pinned)

    def at_work(self, parameters: Sequence[nn.Parameter], kept: Sequence[State]) -> Iterator[Lent]:
        pairs = list(zip(parameters, kept, strict=True))
        small = [pair for pair in pairs if pair[0].numel() < SMALL]
        yield [p for p, _ in small], [state for _, state in small]
        yield from _streamed([pair for pair in pairs if pair[0].numel() >= SMALL])


def _streamed(pairs: Sequence[tuple[nn.Parameter, State]]) -> Iterator[Lent]:
    if not pairs:
        return
    copies = _Copies(_local(pairs[0][0].detach()).device)
    ahead = copies.fetch(pairs[0][1])
    for number, (parameter, kept) in enumerate(pairs):
        lent = copies.arrived(ahead)
        if number + 1 < len(pairs):
            ahead = copies.fetch(pairs[number + 1][1])
        yield [parameter], [lent]
        copies.give_back(lent, kept)
    copies.finish()


class _Copies:
    """Of states to `device` and back: on a GPU beside the update, else at once."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._returned = device, list[torch.cuda.Event]()
        self._streams = [torch.cuda.Stream(device) for _ in range(2)] if device.type == "cuda" else []

    def fetch(self, kept: State) -> tuple[State, torch.cuda.Event | None]:
        moving = {name: _local(value) for name, value in kept.items() if name in MOVED}
        if not self._streams:
            return kept | {name: value.clone() for name, value in moving.items()}, None
        if len(self._returned) > 1:  # the host waits, or the GPU would be asked for the states of all parameters
            self._returned.pop(0).synchronize()
        with torch.cuda.stream(self._streams[0]):
            moved = {name: value.to(self._device, non_blocking=True) for name, value in moving.items()}
            return kept | moved, self._streams[0].record_event()

    def arrived(self, fetched: tuple[State, torch.cuda.Event | None]) -> State:
        lent, arrival = fetched
        if arrival is not None:
            torch.cuda.current_stream(self._device).wait_event(arrival)
            _keep_for(lent, torch.cuda.current_stream(self._device))
        return lent

    def give_back(self, lent: State, kept: State) -> None:
        names = lent.keys() & MOVED
        if not self._streams:
            for name in names:
                _local(kept[name]).copy_(lent[name])
            return
        back = self._streams[1]
        back.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(back):
            for name in names:
                _local(kept[name]).copy_(lent[name], non_blocking=True)
            _keep_for(lent, back)
            self._returned.append(back.record_event())

    def finish(self) -> None:
        """Until main memory has all of them, for whoever reads it."""
        for stream in self._streams[1:]:
            stream.synchronize()


def _keep_for(lent: State, stream: torch.cuda.Stream) -> None:
    for name in lent.keys() & MOVED:
        lent[name].record_stream(stream)


class InEightBits(OnDevice):
    """Both moments in 8 bits with a scale for each 256 of them (https://arxiv.org/abs/2110.02861), the rest as it is.

    A second moment above 0 stays above 0: an update divides by its root.
    """

    def slots(self, plain: Slots) -> dict[str, TensorSpec]:
        numbers = plain[FIRST].shape.numel()
        if numbers < SMALL:
            return dict(plain)
        slots = dict(plain)
        for name, codes in CODES.items():
            slots[name] = TensorSpec(plain[name].shape, torch.uint8)
            slots[name + SCALES] = TensorSpec(torch.Size([codes.blocks(numbers)]), torch.float32)
        return slots

    def empty(self, parameter: Tensor, slot: str, spec: TensorSpec) -> Tensor:
        if slot.endswith(SCALES):
            return torch.empty(spec.shape, dtype=spec.dtype, device=parameter.device)
        return super().empty(parameter, slot, spec)

    def at_work(self, parameters: Sequence[nn.Parameter], kept: Sequence[State]) -> Iterator[Lent]:
        pairs = list(zip(parameters, kept, strict=True))
        small = [pair for pair in pairs if pair[0].numel() < SMALL]
        yield [p for p, _ in small], [state for _, state in small]
        for parameter, state in pairs:
            if parameter.numel() < SMALL:
                continue
            lent = state | {name: c.dequantize(state[name], state[name + SCALES]) for name, c in CODES.items()}
            yield [parameter], [lent]
            for name, codes in CODES.items():
                indices, scales = codes.quantize(lent[name])
                if name == SECOND:
                    indices.masked_fill_((indices == 0) & (lent[name] > 0), 1)
                state[name].copy_(indices)
                state[name + SCALES].copy_(scales)


STORAGES: Mapping[OptimizerStates, Callable[[], Storage]] = {
    "device": OnDevice,
    "cpu": InMainMemory,
    "8bit": InEightBits,
}


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


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
