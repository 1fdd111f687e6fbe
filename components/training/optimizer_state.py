"""Storage of AdamW's states (moments, residuals) between updates, and their names and checks in checkpoints.

Between updates the states of a parameter are on its device, in main memory, or on its device with moments in 8 bits.
The arithmetic of an update does not depend on this: a `Storage` lends it the states as plain tensors on the parameter's
device and takes them back afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Literal, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from armature.components.contracts.errors import DataError
from armature.components.models.blockwise import SIGNED, UNSIGNED
from armature.components.models.flash import TRITON
from armature.components.training.sharded_tensors import TensorSpec

OptimizerStates = Literal["device", "cpu", "8bit"]
State = dict[str, Tensor]
Slots = Mapping[str, TensorSpec]
Lent = tuple[Sequence[nn.Parameter], Sequence[State]]
FIRST, SECOND, RESIDUAL, LOW = "exp_avg", "exp_avg_sq", "residual", "low"
"""Names of state slots: the first and the second moment, and the part of a bf16 weight that rounding cut off.

That part is kept as a bf16 residual, or as the lower 16 bits of an fp32 weight.
"""
SMALL = 4096
"""Number of elements below which a parameter, such as a norm's weight, keeps plain states on its device."""
MOVED = frozenset({FIRST, SECOND, RESIDUAL, LOW})
"""Slots that `InMainMemory` keeps in main memory."""
CODES = {FIRST: SIGNED, SECOND: UNSIGNED}
"""The 8-bit code in which each moment is stored, by slot."""
SCALES = "_scales"
"""Suffix of the slot with the scales of an 8-bit moment, as in exp_avg_scales. Each block has one scale."""

Optimizer = torch.optim.Optimizer
Parameters = Mapping[str, nn.Parameter]
WEIGHT, STATE = "weight/", "optimizer/"
"""Prefixes of tensor names in a checkpoint: weight/<parameter> and optimizer/<parameter>|<slot>."""


class Storage(Protocol):
    """Keeps the optimizer's states between updates."""

    def slots(self, plain: Slots) -> dict[str, TensorSpec]:
        """Return shape and dtype of the stored tensors, by slot, of a parameter whose plain states are `plain`."""
        ...

    def empty(self, parameter: Tensor, slot: str, spec: TensorSpec) -> Tensor:
        """Return an uninitialized tensor in which one slot of `parameter` can be stored."""
        ...

    def at_work(self, parameters: Sequence[nn.Parameter], states: Sequence[State]) -> Iterator[Lent]:
        """Yield groups of parameters, each parameter with its plain states on its device.

        The caller updates these in place; when it asks for the next group, they are stored. Moments in 8 bits are
        lent as they are if the caller's kernel updates them so.
        """
        ...


class OnDevice:
    """Keeps plain states on the device of their parameter."""

    def slots(self, plain: Slots) -> dict[str, TensorSpec]:
        return dict(plain)

    def empty(self, parameter: Tensor, slot: str, spec: TensorSpec) -> Tensor:
        return torch.empty_like(parameter, dtype=spec.dtype)

    def at_work(self, parameters: Sequence[nn.Parameter], states: Sequence[State]) -> Iterator[Lent]:
        yield parameters, states


class InMainMemory(OnDevice):
    """Keeps states in main memory, pinned for a GPU. The GPU holds the states of at most three parameters at once.

    The GPU computes the same update as with `OnDevice`, so results are equal bit for bit. While it updates one
    parameter, two further streams copy the states of the next parameter in and the previous parameter's out.
    """

    def empty(self, parameter: Tensor, slot: str, spec: TensorSpec) -> Tensor:
        if parameter.numel() < SMALL:
            return super().empty(parameter, slot, spec)
        pinned = local_tensor(parameter).is_cuda
        return torch.empty_like(parameter, dtype=spec.dtype, device="cpu", pin_memory=pinned)

    def at_work(self, parameters: Sequence[nn.Parameter], states: Sequence[State]) -> Iterator[Lent]:
        small, large = _by_size(parameters, states)
        yield small
        if not large:
            return
        copies = _Copies(local_tensor(large[0][0].detach()).device)
        fetched = copies.fetch(large[0][1])
        for number, (parameter, stored) in enumerate(large):
            lent = copies.arrived(fetched)
            if number + 1 < len(large):
                fetched = copies.fetch(large[number + 1][1])
            yield [parameter], [lent]
            copies.give_back(lent, stored)
        copies.finish()


def _by_size(
    parameters: Sequence[nn.Parameter], states: Sequence[State]
) -> tuple[Lent, list[tuple[nn.Parameter, State]]]:
    """Separate small parameters from large ones.

    Return the parameters with fewer than `SMALL` elements and their states as one group. Return each larger parameter
    as a pair with its state.
    """
    pairs = list(zip(parameters, states, strict=True))
    small = [pair for pair in pairs if pair[0].numel() < SMALL]
    large = [pair for pair in pairs if pair[0].numel() >= SMALL]
    return ([parameter for parameter, _ in small], [state for _, state in small]), large


class _Copies:
    """Copies states from main memory to `device` and back. On a GPU the copies run in streams beside the update."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._returned = device, list[torch.cuda.Event]()
        self._streams = [torch.cuda.Stream(device) for _ in range(2)] if device.type == "cuda" else []

    def fetch(self, stored: State) -> tuple[State, torch.cuda.Event | None]:
        """Start copying a parameter's states to the device. Return the copies and the CUDA event of their arrival."""
        moving = {name: local_tensor(value) for name, value in stored.items() if name in MOVED}
        if not self._streams:
            return stored | {name: value.clone() for name, value in moving.items()}, None
        # Wait on the host: otherwise it would queue copies, and allocate GPU memory, for the states of all parameters.
        if len(self._returned) > 1:
            self._returned.pop(0).synchronize()
        with torch.cuda.stream(self._streams[0]):
            moved = {name: value.to(self._device, non_blocking=True) for name, value in moving.items()}
            return stored | moved, self._streams[0].record_event()

    def arrived(self, fetched: tuple[State, torch.cuda.Event | None]) -> State:
        """Make the update wait until the copies that `fetch` started are complete, and return the copies."""
        lent, arrival = fetched
        if arrival is not None:
            torch.cuda.current_stream(self._device).wait_event(arrival)
            _keep_for(lent, torch.cuda.current_stream(self._device))
        return lent

    def give_back(self, lent: State, stored: State) -> None:
        """Start copying the updated states `lent` from the device to `stored` in main memory."""
        names = lent.keys() & MOVED
        if not self._streams:
            for name in names:
                local_tensor(stored[name]).copy_(lent[name])
            return
        back = self._streams[1]
        back.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(back):
            for name in names:
                local_tensor(stored[name]).copy_(lent[name], non_blocking=True)
            _keep_for(lent, back)
            self._returned.append(back.record_event())

    def finish(self) -> None:
        """Block until all updated states are in main memory, because the caller may read them next."""
        for stream in self._streams[1:]:
            stream.synchronize()


def _keep_for(lent: State, stream: torch.cuda.Stream) -> None:
    """Keep the allocator from reusing the memory of the states `lent` while `stream` uses it."""
    for name in lent.keys() & MOVED:
        lent[name].record_stream(stream)


class InEightBits(OnDevice):
    """Keeps both moments in 8 bits with one scale per block of 256 numbers, and all other states plain.

    Source: https://arxiv.org/abs/2110.02861. A second moment above 0 is never rounded to 0, because an update divides
    by its root.
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

    def at_work(self, parameters: Sequence[nn.Parameter], states: Sequence[State]) -> Iterator[Lent]:
        small, large = _by_size(parameters, states)
        yield small
        # The kernel that updates bf16 weights on a GPU reads and writes moments in 8 bits.
        fused = [pair for pair in large if pair[0].dtype != torch.float32 and on_gpu(pair[0])]
        yield [parameter for parameter, _ in fused], [state for _, state in fused]
        for parameter, state in large:
            if parameter.dtype == torch.float32 or not on_gpu(parameter):
                lent = state | {slot: _plain(state, slot) for slot in CODES}
                yield [parameter], [lent]
                for slot in CODES:
                    _store(state, slot, lent[slot])


def _plain(state: State, slot: str) -> Tensor:
    """Return an 8-bit moment as fp32 numbers."""
    indices, scales, codes = state[slot], state[slot + SCALES], CODES[slot]
    if on_gpu(indices):
        return kernels().dequantize(indices, scales, codes)
    return codes.dequantize(indices, scales)


def _store(state: State, slot: str, moment: Tensor) -> None:
    """Store an fp32 moment in 8 bits. A number above 0 gets at least the lowest code above 0, in second moments."""
    indices, scales, codes, least = state[slot], state[slot + SCALES], CODES[slot], int(slot == SECOND)
    if on_gpu(indices):
        kernels().quantize(moment, codes, indices, scales, least)
        return
    nearest, largest = codes.quantize(moment)
    indices.copy_(nearest.masked_fill_((nearest < least) & (moment > 0), least))
    scales.copy_(largest)


def on_gpu(tensor: Tensor) -> bool:
    """Check that the Triton kernels can update `tensor`."""
    return tensor.is_cuda and tensor.is_contiguous() and TRITON


def kernels() -> ModuleType:
    """Return the module of Triton kernels, which can only be imported if Triton is installed."""
    from armature.components.training import kernels

    return kernels


STORAGES: Mapping[OptimizerStates, Callable[[], Storage]] = {
    "device": OnDevice,
    "cpu": InMainMemory,
    "8bit": InEightBits,
}


def local_tensor(tensor: Tensor) -> Tensor:
    """Return this rank's shard if `tensor` is a DTensor, else the tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def slots_of(optimizer: Optimizer, parameter: nn.Parameter) -> dict[str, TensorSpec]:
    """Return shape and dtype of each state tensor that `optimizer` keeps for an updated parameter, by slot name.

    If `optimizer` has a method `slots`, its result is returned; any other optimizer is taken for torch's AdamW.
    """
    if method := getattr(optimizer, "slots", None):
        slots: dict[str, TensorSpec] = method(parameter)
        return slots
    moment = TensorSpec(parameter.shape, parameter.dtype)
    return {"step": TensorSpec(torch.Size(()), torch.float32), "exp_avg": moment, "exp_avg_sq": moment}


def state_tensors(optimizer: Optimizer, trained: Parameters) -> dict[str, Tensor]:
    """Return the trained weights and the optimizer's states under their names in a checkpoint, sharded as they are."""
    tensors = {WEIGHT + name: parameter.detach() for name, parameter in trained.items()}
    for name, parameter in trained.items():
        tensors |= {f"{STATE}{name}|{slot}": value for slot, value in optimizer.state[parameter].items()}
    return tensors


def empty_state(
    saved: Mapping[str, TensorSpec], optimizer: Optimizer, trained: Parameters, where: Path
) -> dict[str, dict[str, Tensor]]:
    """Return uninitialized tensors for the optimizer states in a checkpoint, by parameter and slot.

    They are sharded like their parameter, or placed where the optimizer keeps them.

    A parameter that was never updated does not have an entry. States saved in lower precision than the optimizer's are
    accepted and converted on reading: torch's AdamW keeps bf16 moments for bf16 weights.

    Args:
        saved: the tensors in the checkpoint.
        where: the checkpoint's path, for errors.

    Raises:
        DataError: the checkpoint has the weights or states of another model or optimizer.
    """
    weights = {name.removeprefix(WEIGHT) for name in saved if name.startswith(WEIGHT)}
    _same_names("names of weights", set(trained), weights, where)
    for name, parameter in trained.items():
        _refuse_misfit(saved[WEIGHT + name], TensorSpec(parameter.shape, parameter.dtype), name, where)
    saved_slots: dict[str, set[str]] = {}
    for key in saved:
        if key.startswith(STATE):
            name, _, slot = key.removeprefix(STATE).rpartition("|")
            saved_slots.setdefault(name, set()).add(slot)
    if unknown := sorted(saved_slots.keys() - trained.keys()):
        raise refusal(f"there is state for {_few(unknown)}, which this run does not train", where)
    state = {}
    for name, slots in saved_slots.items():
        wanted = slots_of(optimizer, trained[name])
        _same_names(f"slots of {name}", set(wanted), slots, where)
        for slot, spec in wanted.items():
            _refuse_misfit(saved[f"{STATE}{name}|{slot}"], spec, f"{name}|{slot}", where)
        state[name] = {slot: _empty(optimizer, trained[name], slot, spec) for slot, spec in wanted.items()}
    return state


def refuse_counts(counts: Iterable[tuple[str, Tensor]], where: Path) -> None:
    """Check that update counts (slot "step") are positive whole numbers.

    `counts` has a pair of a parameter's name and its update count for each parameter.

    Raises:
        DataError: a count is not a positive whole number.
    """
    for name, count in counts:
        if fault := miscount(count):
            raise refusal(f"{name}|step {fault}", where)


def miscount(count: Tensor) -> str:
    """Return a phrase about the fault of an update count (slot "step"); empty if it is a positive whole number."""
    number = count.item()
    return "" if number >= 1 and number % 1 == 0 else f"is {number}, not a number of updates"  # NaN compares false


def misfit(saved: TensorSpec, wanted: TensorSpec) -> str:
    """Return why a saved tensor cannot be read into a tensor like `wanted` without loss; empty if it can."""
    if saved.shape != wanted.shape:
        return f"has shape {list(saved.shape)}, {list(wanted.shape)} is needed"
    if saved.dtype.is_complex or torch.promote_types(saved.dtype, wanted.dtype) != wanted.dtype:
        return f"is {saved.dtype}, which does not fit into {wanted.dtype}"
    return ""


def refusal(what: str, where: Path) -> DataError:
    """Return the error that refuses the checkpoint at `where`; `what` is the fault that its message names."""
    remedy = "delete this folder; the run then resumes from the checkpoint before it"
    return DataError(
        f"the checkpoint cannot be resumed from: {what}", code="checkpoint_mismatch", where=str(where), remedy=remedy
    )


def _empty(optimizer: Optimizer, parameter: nn.Parameter, slot: str, spec: TensorSpec) -> Tensor:
    """Return an uninitialized tensor for one slot of a parameter's state.

    The optimizer places it if it has a method `empty_slot`. Else it is placed as torch's AdamW does: moments like their
    parameter, and counts on the CPU.
    """
    if method := getattr(optimizer, "empty_slot", None):
        made: Tensor = method(parameter, slot, spec)
        return made
    if slot == "step":
        return torch.empty(spec.shape, dtype=spec.dtype)
    return torch.empty_like(parameter.detach(), dtype=spec.dtype)


def _refuse_misfit(saved: TensorSpec, wanted: TensorSpec, name: str, where: Path) -> None:
    if fault := misfit(saved, wanted):
        raise refusal(f"{name} {fault}", where)


def _same_names(what: str, wanted: set[str], saved: set[str], where: Path) -> None:
    missing, unknown = sorted(wanted - saved), sorted(saved - wanted)
    if missing or unknown:
        parts = [f"{_few(missing)} missing" if missing else "", f"{_few(unknown)} unknown" if unknown else ""]
        raise refusal(f"the {what} do not fit: {', '.join(part for part in parts if part)}", where)


def _few(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
