"""A folder format for named tensors that several ranks hold, whole or sharded; any number of ranks can read it.

`torch.distributed.checkpoint` does the planning, copying, writing and resharding. It would store its metadata in a
pickled file; instead, each rank writes its part of the metadata as JSON beside its shards. Ranks do not communicate.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed.checkpoint as dcp
from pydantic import BaseModel, ConfigDict, NonNegativeInt, ValidationError
from torch import Tensor
from torch.distributed.checkpoint import CheckpointException, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem

INDEX = "index.json"
_ONE_PROCESS = "torch.distributed is disabled, unavailable or uninitialized"
warnings.filterwarnings("ignore", message=_ONE_PROCESS)  # torch warns so for `no_dist`, which is on purpose here


class SavedShard(BaseModel):
    """One shard of a tensor as a box (offsets and sizes), and the byte range that holds it in the rank's file."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    offsets: list[NonNegativeInt]
    sizes: list[NonNegativeInt]
    start: NonNegativeInt
    length: NonNegativeInt


class SavedTensor(BaseModel):
    """Dtype and shape of a whole tensor, and a list of its shards that one rank wrote."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    dtype: str
    shape: list[NonNegativeInt]
    shards: list[SavedShard]


class SavedTensors(BaseModel):
    """The index file of one rank: the tensors in its data file."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    file: str
    tensors: dict[str, SavedTensor]


@dataclass(frozen=True)
class TensorSpec:
    """Shape and dtype of a tensor."""

    shape: torch.Size
    dtype: torch.dtype


class ShardedTensors:
    """Reads the tensors in a folder that `write` filled on every rank.

    Raises:
        ValueError, OSError: the folder has no tensors, a rank's part is missing, or an index is not valid.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        entries: dict[str, TensorStorageMetadata] = {}
        storage: dict[MetadataIndex, _Location] = {}
        for path in sorted(folder.glob(f"rank-*/{INDEX}")):
            for name, saved, file in _index(path):
                entry = entries.setdefault(name, _entry(saved))
                if entry.size != torch.Size(saved.shape) or entry.properties.dtype != _dtype(saved.dtype):
                    raise ValueError(f"{name} has another shape or type in {path}")
                for shard in saved.shards:
                    chunk = ChunkStorageMetadata(torch.Size(shard.offsets), torch.Size(shard.sizes))
                    _refuse_outside(name, chunk, entry.size)
                    if prod(chunk.sizes):
                        entry.chunks.append(chunk)
                        where = f"{path.parent.name}/{file}"
                        storage[MetadataIndex(name, chunk.offsets)] = _Location(where, shard.start, shard.length)
        if not entries:
            raise ValueError("the folder has no tensors")
        for name, entry in entries.items():
            if sum(prod(chunk.sizes) for chunk in entry.chunks) != prod(entry.size):
                raise ValueError(f"the shards of {name} do not add up to the whole tensor")
        self._metadata = Metadata(cast(Any, entries), storage_data=storage)

    @property
    def specs(self) -> dict[str, TensorSpec]:
        """Shape and dtype of each tensor, by name."""
        entries = cast(dict[str, TensorStorageMetadata], self._metadata.state_dict_metadata)
        return {name: TensorSpec(entry.size, entry.properties.dtype) for name, entry in entries.items()}

    def check_finite(self, targets: Mapping[str, Tensor]) -> None:
        """Read the data that `read` would copy to `targets` and check that it is finite, without changing `targets`.

        Raises:
            NotFiniteError: a tensor has NaN or infinite values.
            ValueError, OSError: a file is damaged.
        """
        self._load(targets, _FiniteCheck())

    def read(self, targets: Mapping[str, Tensor]) -> None:
        """Fill each tensor of `targets` with the saved tensor of the same name.

        A target may have any device and dtype. Of a DTensor only this rank's shards are filled.

        Raises:
            ValueError, OSError: a file is damaged; some of `targets` may be filled already.
        """
        self._load(targets, DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False))

    def _load(self, targets: Mapping[str, Tensor], planner: DefaultLoadPlanner) -> None:
        try:
            dcp.load(dict(targets), storage_reader=_Reader(self._folder, self._metadata), planner=planner, no_dist=True)
        except CheckpointException as failed:
            raise _cause(failed) from failed


class NotFiniteError(ValueError):
    """Raised if a tensor has NaN or infinite values. The exception's argument is the name of the tensor."""


@torch.no_grad()
def copied(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return copies on the CPU of plain tensors and of this rank's shards of DTensors, by name."""
    return {name: value.detach().to("cpu", copy=True) for name, value in tensors.items()}


def write(tensors: Mapping[str, Tensor], folder: Path, rank: int) -> None:
    """Write this rank's plain tensors and shards of DTensors to `folder`/rank-<rank>/.

    Args:
        tensors: the tensors by name. A plain tensor must be passed by one rank only.
        folder: an existing folder, the same for all ranks.

    Raises:
        ValueError, OSError: a tensor could not be written.
    """
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    try:
        dcp.save(dict(tensors), storage_writer=_Writer(folder / f"rank-{rank}"), planner=planner, no_dist=True)
    except CheckpointException as failed:
        raise _cause(failed) from failed


def _cause(failed: CheckpointException) -> Exception:
    """Return the original error that torch wrapped in a `CheckpointException`."""
    first = next(iter(failed.failures.values()))[0]
    return first if isinstance(first, OSError | ValueError) else ValueError(f"{type(first).__name__}: {first}")


@dataclass(frozen=True)
class _Location:
    """Storage location of a shard. It has the attributes that torch's `FileSystemReader` reads."""

    relative_path: str
    offset: int
    length: int
    transform_descriptors: None = None


class _Writer(FileSystemWriter):
    """A writer of torch checkpoints that stores the index of the tensors as JSON instead of a pickle."""

    def finish(self, metadata: Metadata, results: list[list[Any]]) -> None:
        written = {result.index: result.storage_data for part in results for result in part}
        files = {info.relative_path for info in written.values()}
        tensors = {}
        for name, entry in metadata.state_dict_metadata.items():
            assert isinstance(entry, TensorStorageMetadata)
            shards = []
            for chunk in entry.chunks:
                info = written[MetadataIndex(name, chunk.offsets)]
                shards.append(
                    SavedShard(
                        offsets=list(chunk.offsets), sizes=list(chunk.sizes), start=info.offset, length=info.length
                    )
                )
            dtype = str(entry.properties.dtype).removeprefix("torch.")
            tensors[name] = SavedTensor(dtype=dtype, shape=list(entry.size), shards=shards)
        index = SavedTensors(file=next(iter(files), ""), tensors=tensors)
        Path(self.path, INDEX).write_text(index.model_dump_json())


class _Reader(FileSystemReader):
    """A reader of torch checkpoints that gets metadata which was already read, instead of reading it from a file."""

    def __init__(self, folder: Path, metadata: Metadata) -> None:
        super().__init__(folder)
        self._metadata = metadata

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._metadata


class _FiniteCheck(DefaultLoadPlanner):
    """A load planner that reads shards into temporary memory, one at a time, and checks their values."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        assert self.metadata is not None
        entry = cast(TensorStorageMetadata, self.metadata.state_dict_metadata[read_item.storage_index.fqn])
        return torch.empty(read_item.lengths, dtype=entry.properties.dtype)

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        if not torch.isfinite(tensor).all():
            raise NotFiniteError(read_item.storage_index.fqn)


def _index(path: Path) -> list[tuple[str, SavedTensor, str]]:
    try:
        index = SavedTensors.model_validate_json(path.read_bytes())
    except ValidationError as error:
        raise ValueError(f"{path} is not a valid index: {error.errors()[0]['msg']}") from error
    if index.tensors and Path(index.file).name != index.file:
        raise ValueError(f"{path} names a file in another folder: {index.file!r}")
    return [(name, saved, index.file) for name, saved in index.tensors.items()]


def _entry(saved: SavedTensor) -> TensorStorageMetadata:
    return TensorStorageMetadata(TensorProperties(dtype=_dtype(saved.dtype)), torch.Size(saved.shape), [])


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"there is no dtype {name!r}")
    return dtype


def _refuse_outside(name: str, chunk: ChunkStorageMetadata, size: torch.Size) -> None:
    dims = len(chunk.offsets) == len(chunk.sizes) == len(size)
    if not dims or any(o + s > total for o, s, total in zip(chunk.offsets, chunk.sizes, size, strict=True)):
        raise ValueError(f"a shard of {name} lies outside of the tensor")
