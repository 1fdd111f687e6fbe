"""What lies in a checkpoint's safetensors files, read from their headers alone."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from armature.components.artifacts.disk import atomic_replacement, raising_disk_full
from armature.components.contracts.errors import DataError, StoreError
from armature.components.contracts.files import bare_name, read_bytes, regular

Tensors = dict[str, tuple[str, tuple[int, ...]]]
INDEX = "model.safetensors.index.json"
_REMEDY = "fetch or save the checkpoint again"


def open_tensors(path: Path, framework: str = "numpy") -> Any:
    """A safetensors file whose header has been checked against its size; a context that closes it.

    Raises:
        DataError: it is missing or damaged, or still being written.
    """
    try:
        return safe_open(regular(path), framework=framework)
    except (SafetensorError, OSError) as error:
        raise DataError(
            f"not a readable safetensors file: {error}", code="safetensors_unreadable", where=str(path), remedy=_REMEDY
        ) from error


@contextmanager
def checkpoint_folder(folder: Path) -> Iterator[Path]:
    """Yield an empty folder to write a checkpoint into; it replaces `folder` atomically when the block ends well.

    Raises:
        StoreError: the checkpoint could not be written, as on a full disk.
    """
    try:
        with raising_disk_full(folder), atomic_replacement(folder) as new:
            yield new
    except SafetensorError as error:  # safetensors has no OSError
        raise StoreError(
            f"{folder.name} could not be written: {error}",
            where=str(folder),
            remedy="free space or set another store, then run again: what was finished is kept",
        ) from error


def shard_names(index: Path) -> dict[str, str]:
    """Name of a tensor -> file beside `index`, as model.safetensors.index.json says.

    Raises:
        DataError: it is not such a file, or names a file in another folder.
    """
    try:
        files = json.loads(read_bytes(index))["weight_map"].items()
    except (OSError, ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
        raise DataError(
            f"not an index of safetensors: {error!r:.200}",
            code="safetensors_index_unreadable",
            where=str(index),
            remedy=_REMEDY,
        ) from error
    return {name: bare_name(file, str(index)) for name, file in files}


def read_tensors(folder: Path) -> Tensors:
    """Name -> (dtype, shape) of every tensor in the folder's safetensors files, those of its index where it has one.

    Raises:
        DataError: there are none, or one is damaged (or still being written).
    """
    index = folder / INDEX
    found = {folder / name for name in shard_names(index).values()} if index.is_file() else folder.glob("*.safetensors")
    files = sorted(found)
    if not files:
        raise DataError(
            "no safetensors in the model folder",
            code="safetensors_missing",
            where=str(folder),
            remedy="convert the weights with save_pretrained; pickled weights are not loaded",
        )
    tensors: Tensors = {}
    for path in files:
        with open_tensors(path) as file:
            for name in file.keys():  # noqa: SIM118  not a mapping
                part = file.get_slice(name)
                tensors[name] = (part.get_dtype(), tuple(part.get_shape()))
    return tensors
