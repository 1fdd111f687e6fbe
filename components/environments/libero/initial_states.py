"""Initial states: arrays that LIBERO stores as pickles, read without running what a pickle says."""

from __future__ import annotations

import hashlib
import io
import pickle
import zipfile
from collections.abc import Collection
from typing import Any

import numpy as np
from numpy._core.multiarray import _reconstruct
from numpy.typing import NDArray

from armature.components.contracts.errors import DataError
from armature.components.contracts.files import read_bytes
from armature.components.environments.libero.tasks import LiberoTask

LARGEST = 64 * 2**20
_PICKLE = "archive/data.pkl"


def _latin(text: str, encoding: str) -> bytes:
    """How pickles of an old protocol hold bytes."""
    if encoding != "latin1":
        raise pickle.UnpicklingError(f"bytes are written as {encoding!r}, not as latin1")
    return text.encode("latin1")


_NEEDED = {
    ("numpy.core.multiarray", "_reconstruct"): _reconstruct,
    ("numpy._core.multiarray", "_reconstruct"): _reconstruct,
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): np.dtype,
    ("_codecs", "encode"): _latin,
}
"""All that a pickled array of numbers refers to."""


def load_initial_states(task: LiberoTask, trusted: Collection[str] = ()) -> NDArray[np.float64]:
    """(states, values): time, positions and velocities as MuJoCo has them, flat.

    Args:
        trusted: SHA-256 of files that are read beside the one that the package came with.

    Raises:
        DataError: the file is missing, unknown, or anything but one array of finite numbers.
    """
    path = task.states_file
    try:
        data = read_bytes(path, LARGEST)
    except OSError as error:
        raise DataError(
            f"the initial states cannot be read: {error}", code="initial_states_unreadable", where=str(path)
        ) from error
    digest = hashlib.sha256(data).hexdigest()
    if digest not in (task.digest, *trusted):
        raise DataError(
            f"initial states with the digest {digest} are not the package's, which have {task.digest}",
            code="unknown_initial_states",
            where=str(path),
            remedy="install hf-libero again, or name the digest in simulator.trusted_initial_states",
        )
    return read_states(data, str(path))


def read_states(data: bytes, where: str) -> NDArray[np.float64]:
    """
    Raises:
        DataError: not a torch archive of one array of finite numbers.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            if archive.getinfo(_PICKLE).file_size > LARGEST:
                raise DataError(
                    f"initial states of more than {LARGEST} bytes", code="invalid_initial_states", where=where
                )
            states = _ArraysOnly(io.BytesIO(archive.read(_PICKLE))).load()
    except (zipfile.BadZipFile, KeyError, pickle.UnpicklingError, EOFError, ValueError, TypeError) as error:
        raise DataError(
            f"not an array of initial states: {error}", code="invalid_initial_states", where=where
        ) from error
    if not isinstance(states, np.ndarray) or states.dtype != np.float64 or states.ndim != 2:
        raise DataError(
            "initial states are not one array (states, values) of float64", code="invalid_initial_states", where=where
        )
    if not np.isfinite(states).all():
        raise DataError(
            f"initial state {np.argwhere(~np.isfinite(states))[0][0]} is not finite",
            code="invalid_initial_states",
            where=where,
        )
    return states


class _ArraysOnly(pickle.Unpickler):
    """Refuses every name but those of an array."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _NEEDED:
            raise pickle.UnpicklingError(f"it refers to {module}.{name}, which no array of numbers needs")
        return _NEEDED[module, name]

    def persistent_load(self, pid: object) -> Any:
        raise pickle.UnpicklingError("it refers to tensors outside it")
