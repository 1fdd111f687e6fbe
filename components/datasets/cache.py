"""Where fetched files and opened columns are kept on this machine."""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Cache:
    """Where fetched files and opened tables are kept, and how much one dataset may fetch.

    All of it can be deleted at any time that nothing uses it.
    """

    folder: Path
    limit_bytes: int

    @classmethod
    def standard(cls) -> Cache:
        """`ARMATURE_CACHE` or ~/.cache/armature, and 200 GB or `ARMATURE_FETCH_LIMIT_GB`."""
        folder = os.environ.get("ARMATURE_CACHE") or Path.home() / ".cache/armature"
        return cls(Path(folder).absolute(), int(float(os.environ.get("ARMATURE_FETCH_LIMIT_GB", "200")) * 1e9))


def make_once(target: Path, write: Callable[[Path], None]) -> Path:
    """`target`, which `write` fills under another name; one process does, others wait and find it made."""
    if target.is_file():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with (target.parent / f".{target.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.is_file():
            handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=".new-")
            os.close(handle)
            try:
                write(Path(temporary))
                Path(temporary).rename(target)
            finally:
                Path(temporary).unlink(missing_ok=True)
    return target
