"""What changed in a model's weights from one version to the next, bit for bit, and the weights that it adds up to.

A version is a folder: a checkpoint, or a file with the changes since the version in another folder beside it. For each
tensor with changes the file has `NAME`, the (M,) new values, and `NAME gaps`, uint8: the distances between their
places in the flattened tensor, where 255 stands for 255 places, to which the next byte adds more. So 2 bytes
of value and one of distance say what became of a bf16 weight.

It runs in the trainer and in vLLM's workers, and needs torch and safetensors alone.
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
    """The flattened tensor as integers, which NaN and -0.0 are as well; a view of one that is contiguous."""
    return tensor.contiguous().view(-1).view(_WORDS[tensor.element_size()])


def encode(places: Tensor) -> Tensor:
    """Rising (M,) int64 as uint8 distances; see above."""
    gaps = torch.diff(places, prepend=places.new_zeros(1))
    ends = (gaps // _LONGEST + 1).cumsum(0) - 1
    count = int(ends[-1]) + 1 if len(ends) else 0
    coded = torch.full((count,), _LONGEST, dtype=torch.uint8, device=places.device)
    coded[ends] = (gaps % _LONGEST).to(torch.uint8)
    return coded


def decode(coded: Tensor) -> Tensor:
    """The inverse of `encode`."""
    return coded.cumsum(0, dtype=torch.int64)[coded != _LONGEST]


def weighed(values: Tensor, places: Tensor, first: int) -> int:
    """What `values`, words at `places` of a tensor whose first word is number `first`, add to a digest."""
    factors = (places + first) * _MIX
    factors = (factors ^ (factors >> 29)) | 1  # odd: no change of one word is without effect
    return int((values.to(torch.int64) * factors).sum())


def sum64(*parts: int) -> int:
    """Modulo 2**64, as tensors add."""
    return (sum(parts) + 2**63) % 2**64 - 2**63


class HostWeights:
    """All tensors of a version in main memory, in one piece that a GPU copies from directly, with their digest.

    The digest is the sum, modulo 2**64, of all words times a number that depends on the word's place. So it follows
    from the digest before and what changed.
    """

    def __init__(self, layout: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]) -> None:
        """`layout`: dtype and shape by name."""
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
        """Give the memory back."""
        self._release()
        self.tensors.clear()
        self._memory = torch.empty(0, dtype=torch.uint8)

    @classmethod
    def read(cls, folder: Path) -> HostWeights:
        """Those of a checkpoint's safetensors files.

        Raises:
            OSError, SafetensorError: they cannot be read.
        """
        index = folder / _INDEX
        found = (
            {folder / name for name in json.loads(index.read_text())["weight_map"].values()} if index.exists() else ()
        )
        files = sorted(found or folder.glob("*.safetensors"))
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
        """Put (M,) `values` at the `places` of a tensor, both on the CPU."""
        flat, new, first = words(self.tensors[name]), words(values), self._first[name]
        lost, won = weighed(flat[places], places, first), weighed(new, places, first)
        flat[places] = new
        self.digest = sum64(self.digest, won, -lost)


def write_delta(folder: Path, held: HostWeights, base: str, new: Iterable[tuple[str, Tensor]]) -> int:
    """Bring `held`, the version in the folder `base` beside `folder`, to `new`, and write what changed into `folder`.

    `new` are the same tensors by name, on any device. The bytes that were written are returned.

    Raises:
        ValueError: other tensors than are held.
        OSError, SafetensorError: it cannot be written; `held` is then of no more use.
    """
    parts: dict[str, Tensor] = {}
    before, names = held.digest, set(held.tensors)
    for name, tensor in new:
        kept = held.tensors.get(name)
        if kept is None or kept.shape != tensor.shape or kept.dtype != tensor.dtype:
            raise ValueError(f"{name} is not a tensor of the version before")
        names.discard(name)
        there = words(kept).to(tensor.device, non_blocking=True)
        flat = words(tensor)
        places = (flat != there).nonzero()[:, 0]
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
    """`base`, and the digests `before` and `after`; None: the folder has a whole checkpoint."""
    if not (folder / DELTA).exists():
        return None
    with safe_open(folder / DELTA, framework="pt") as opened:
        return dict(opened.metadata())


def apply_delta(folder: Path, held: HostWeights) -> None:
    """Bring `held` to the version in `folder`.

    Raises:
        ValueError: it is not the version before, or does not become what it should.
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
    """Those with changes that lead to `folder`, newest first; from the weights that have `digest`, or a checkpoint,
    which is then the last."""
    while (facts := read_facts(folder)) is not None:
        if facts["after"] == str(digest):
            return
        yield folder
        folder = folder.parent / facts["base"]
    yield folder


def bring_to(folder: Path, held: HostWeights | None) -> HostWeights:
    """The version in `folder`; `held` itself, changed, where it is that or one of those before it.

    Raises:
        ValueError: changes that do not add up.
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
