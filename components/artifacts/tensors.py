"""Names, dtypes and shapes of a checkpoint's tensors, read from the headers of its safetensors files."""

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
"""Dtype and shape of each tensor, by tensor name. Dtypes are written as in safetensors, such as `BF16`."""
INDEX = "model.safetensors.index.json"
"""Name of the index file of a checkpoint with several files. It says which file holds each tensor."""
_REMEDY = "fetch or save the checkpoint again"


def open_tensors(path: Path, framework: str = "numpy") -> Any:
    """Open a safetensors file after checking its header against the file's size. Use the result as a context manager.

    Raises:
        DataError: the file is missing, damaged or still being written.
    """
    try:
        return safe_open(regular(path), framework=framework)
    except (SafetensorError, OSError) as error:
        raise DataError(
            f"not a readable safetensors file: {error}", code="safetensors_unreadable", where=str(path), remedy=_REMEDY
        ) from error


@contextmanager
def new_checkpoint_folder(folder: Path) -> Iterator[Path]:
    """Yield an empty folder to write a checkpoint into; it replaces `folder` atomically when the block ends well.

    Raises:
        StoreError: the checkpoint could not be written, as on a full disk.
    """
    try:
        with raising_disk_full(folder), atomic_replacement(folder) as new:
            yield new
    except SafetensorError as error:  # raised in place of an OSError
        raise StoreError(
            f"{folder.name} could not be written: {error}",
            where=str(folder),
            remedy="free space or set another store, then run again: what was finished is kept",
        ) from error


def shard_names(index: Path) -> dict[str, str]:
    """Read a checkpoint's `index` (model.safetensors.index.json). Return the name of the file that holds each tensor,
    by tensor name.

    Raises:
        DataError: `index` is not an index of safetensors files, or it names a file in another folder.
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
    """Return the dtype and shape of every tensor in a checkpoint folder, by tensor name.

    If the folder has an index, only the files named there are read, else every `*.safetensors` file. Tensor data is not
    read.

    Raises:
        DataError: the folder has no safetensors files, or one of them is damaged or still being written.

    Example:
        >>> import tempfile, numpy, safetensors.numpy
        >>> folder = Path(tempfile.mkdtemp())
        >>> safetensors.numpy.save_file({"head": numpy.zeros((2, 3), "float32")}, folder / "model.safetensors")
        >>> read_tensors(folder)
        {'head': ('F32', (2, 3))}
    """
    index = folder / INDEX
    indexed = index.is_file()
    files = sorted({folder / name for name in shard_names(index).values()} if indexed else folder.glob("*.safetensors"))
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
