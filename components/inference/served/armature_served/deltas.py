"""Weight deltas: store the bit-exact changes from one version of a model's weights to the next, and apply them.

A version is a folder. The folder has either a whole checkpoint or a delta file: the changes since the version in
another folder beside it. For each changed tensor the delta file has two entries. `NAME` holds the (M,) new values.
`NAME gaps`, uint8, holds the distances between the indices of these values in the flattened tensor; a byte of 255
means 255 elements, and the next byte is added to it. A changed bf16 weight therefore usually takes 3 bytes: 2 for its
value and 1 for its distance.

This module runs in the trainer and in vLLM's workers, and needs only torch and safetensors.
"""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

DELTA = "delta.safetensors"
_INDEX = "model.safetensors.index.json"
_GAPS = " gaps"
_LONGEST = 255
_ALIGNED = 64
_AT_ONCE = 2**24
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_MIX = -7046029254386353131  # 0x9E3779B97F4A7C15


def words(tensor: Tensor) -> Tensor:
    """Return the flattened tensor's bits as integers, so that NaN and -0.0 compare by their bits.

    The result is a view if the tensor is contiguous, and a copy otherwise.
    """
    return tensor.contiguous().view(-1).view(_WORDS[tensor.element_size()])


def encode(places: Tensor) -> Tensor:
    """Encode ascending (M,) int64 indices as uint8 distances, in the format that the module's docstring describes."""
    gaps = torch.diff(places, prepend=places.new_zeros(1))
    ends = (gaps // _LONGEST + 1).cumsum(0) - 1
    count = int(ends[-1]) + 1 if len(ends) else 0
    coded = torch.full((count,), _LONGEST, dtype=torch.uint8, device=places.device)
    coded[ends] = (gaps % _LONGEST).to(torch.uint8)
    return coded


def decode(coded: Tensor) -> Tensor:
    """Return the (M,) int64 indices that `encode` turned into uint8 distances."""
    return coded.cumsum(0, dtype=torch.int64)[coded != _LONGEST]


def weighed(values: Tensor, places: Tensor, first: int) -> int:
    """Return the contribution of some words of a tensor to the digest of all weights (see `HostWeights`).

    Args:
        values: (M,) the words, as `words` returns them.
        places: (M,) their indices in the flattened tensor.
        first: the index of the tensor's first word among the words of all tensors.
    """
    factors = (places + first) * _MIX
    factors = (factors ^ (factors >> 29)) | 1  # odd, so that every change of a single word changes the digest
    return int((values.to(torch.int64) * factors).sum())


def sum64(*parts: int) -> int:
    """Return the sum of the parts modulo 2**64, as a signed 64-bit integer: int64 tensors overflow the same way."""
    return (sum(parts) + 2**63) % 2**64 - 2**63


class HostWeights:
    """All tensors of a version in one block of main memory, together with their digest.

    The memory is pinned (page-locked) if there is a GPU, so that the GPU can copy from it directly.

    The digest is the sum, modulo 2**64, of each word times a factor that depends on the word's index. It can therefore
    be updated from the changed words alone, without reading the other weights.
    """

    def __init__(self, layout: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]) -> None:
        """Allocate memory for tensors whose dtype and shape `layout` gives by name. The values are uninitialized."""
        self.tensors: dict[str, Tensor] = {}
        self._first: dict[str, int] = {}
        places, size = {}, 0
        for name, (dtype, shape) in sorted(layout.items()):
            places[name] = size
            size += -(-torch.Size(shape).numel() * dtype.itemsize // _ALIGNED) * _ALIGNED
        self._memory = torch.empty(size, dtype=torch.uint8)
        self._release: Callable[[], object] = lambda: None
        if torch.cuda.is_available() and size:
            torch.cuda.cudart().cudaHostRegister(self._memory.data_ptr(), size, 0)
            self._release = weakref.finalize(self, torch.cuda.cudart().cudaHostUnregister, self._memory.data_ptr())
        number = 0
        for name, place in places.items():
            dtype, shape = layout[name]
            flat = self._memory[place : place + torch.Size(shape).numel() * dtype.itemsize]
            self.tensors[name] = flat.view(dtype).view(shape)
            self._first[name] = number
            number += torch.Size(shape).numel()
        self.digest = 0

    def close(self) -> None:
        """Unpin and free the memory. The tensors cannot be used afterwards."""
        self._release()
        self.tensors.clear()
        self._memory = torch.empty(0, dtype=torch.uint8)

    @classmethod
    def read(cls, folder: Path) -> HostWeights:
        """Load all tensors from the safetensors files of the checkpoint in `folder`.

        Raises:
            OSError, SafetensorError: a file cannot be read.
        """
        index = folder / _INDEX
        shards = (
            {folder / name for name in json.loads(index.read_text())["weight_map"].values()} if index.exists() else ()
        )
        files = sorted(shards or folder.glob("*.safetensors"))
        layout = {}
        for file in files:
            with safe_open(file, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118  not a mapping
                    tensor = opened.get_tensor(name)
                    layout[name] = tensor.dtype, tuple(tensor.shape)
        made = cls(layout)
        for file in files:
            with safe_open(file, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118
                    made.tensors[name].copy_(opened.get_tensor(name))
        made.digest = sum64(*(made._whole_digest(name) for name in layout))
        return made

    def _whole_digest(self, name: str) -> int:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        parts, flat = [], words(self.tensors[name])
        for start in range(0, len(flat), _AT_ONCE):
            part = flat[start : start + _AT_ONCE].to(device)
            places = torch.arange(start, start + len(part), device=device)
            parts.append(weighed(part, places, self._first[name]))
        return sum64(*parts)

    def change(self, name: str, places: Tensor, values: Tensor) -> None:
        """Write `values` (M,) to the flat indices `places` (M,) of a tensor and update the digest of all weights.

        Both tensors must be on the CPU.
        """
        flat, new, first = words(self.tensors[name]), words(values), self._first[name]
        lost, won = weighed(flat[places], places, first), weighed(new, places, first)
        flat[places] = new
        self.digest = sum64(self.digest, won, -lost)


def write_delta(folder: Path, held: HostWeights, base: str, new: Iterable[tuple[str, Tensor]]) -> int:
    """Write the changes from `held` to `new` into `folder` as a delta, and update `held` to `new`.

    Args:
        folder: an existing folder, which gets the delta file.
        held: the weights of the version in the folder `base`.
        base: the name of a folder beside `folder`.
        new: the names and new values of all tensors, on any device.

    Returns:
        The size of the delta file in bytes.

    Raises:
        ValueError: `new` differs from `held` in the names, shapes or dtypes of its tensors.
        OSError, SafetensorError: the file cannot be written. `held` has then changed and must not be used any more.
    """
    parts: dict[str, Tensor] = {}
    before, names = held.digest, set(held.tensors)
    for name, tensor in new:
        previous = held.tensors.get(name)
        if previous is None or previous.shape != tensor.shape or previous.dtype != tensor.dtype:
            raise ValueError(f"{name} is not a tensor of the version before")
        names.discard(name)
        old = words(previous).to(tensor.device, non_blocking=True)
        flat = words(tensor)
        places = (flat != old).nonzero()[:, 0]
        if not len(places):
            continue
        parts[name + _GAPS] = encode(places).cpu()
        values = flat[places].cpu()
        parts[name] = values.view(tensor.dtype)
        held.change(name, places.cpu(), parts[name])
    if names:
        raise ValueError(f"{min(names)} of the version before is missing")
    facts = {"base": base, "before": str(before), "after": str(held.digest)}
    save_file(parts, folder / DELTA, metadata=facts)
    return (folder / DELTA).stat().st_size


def read_facts(folder: Path) -> dict[str, str] | None:
    """Return the metadata of the folder's delta file, or None if the folder has a whole checkpoint.

    The keys are `base`, the name of the folder that the delta builds on, and `before` and `after`, the digests of the
    weights before and after the changes, as decimal numbers.
    """
    if not (folder / DELTA).exists():
        return None
    with safe_open(folder / DELTA, framework="pt") as opened:
        return dict(opened.metadata())


def apply_delta(folder: Path, held: HostWeights) -> None:
    """Apply the delta in `folder` to `held`.

    Raises:
        ValueError: `held` is not the version that the delta builds on, or its digest is wrong after the changes.
    """
    facts = read_facts(folder)
    if facts is None or str(held.digest) != facts["before"]:
        raise ValueError(f"{folder} has changes of other weights than are held")
    with safe_open(folder / DELTA, framework="pt") as opened:
        for name in opened.keys():  # noqa: SIM118
            if not name.endswith(_GAPS):
                held.change(name, decode(opened.get_tensor(name + _GAPS)), opened.get_tensor(name))
    if str(held.digest) != facts["after"]:
        raise ValueError(f"the changes in {folder} do not give the weights that they were made from")


def folders_to(folder: Path, digest: int | None = None) -> Iterator[Path]:
    """Yield the folders of the versions that are needed to get to the version in `folder`, newest first.

    The folders have deltas that build on each other. The sequence ends before the version whose digest is `digest`.
    If no version has this digest, the sequence ends with a folder that has a whole checkpoint.
    """
    while (facts := read_facts(folder)) is not None:
        if facts["after"] == str(digest):
            return
        yield folder
        folder = folder.parent / facts["base"]
    yield folder


def bring_to(folder: Path, held: HostWeights | None) -> HostWeights:
    """Return the weights of the version in `folder`.

    If `held` is this version, or an earlier one that its deltas build on and that is itself stored as a delta, then
    `held` is updated in place and returned. Otherwise `held` is closed, the checkpoint that the deltas start from is
    read, and all deltas are applied to it.

    Raises:
        ValueError: a delta does not fit the weights that it is applied to, or gives a wrong digest.
        OSError, SafetensorError: a version is missing or damaged.
    """
    folders = list(folders_to(folder, held.digest if held is not None else None))
    if folders and read_facts(folders[-1]) is None:
        if held is not None:
            held.close()
        held = HostWeights.read(folders.pop())
    assert held is not None
    for changes in reversed(folders):
        apply_delta(changes, held)
    return held
