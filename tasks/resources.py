"""What is left of disk and memory, and a warning before they run out."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

_GIB = 2**30

LOW_DISK = 5 * _GIB
"""Bytes, or a twentieth of the disk where that is less."""

LOW_MEMORY = 0.05
"""Of the machine's memory, or the container's."""

_CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class Free:
    """Bytes: what is left, and how much there is."""

    disk: int
    disk_size: int
    memory: int
    memory_size: int


def free_bytes(store: Path, cgroup: Path = _CGROUP) -> Free:
    """Of the disk that `store` is on or will be, and of memory. A container's limit (cgroup v2) counts."""
    there = next(path for path in (store.absolute(), *store.absolute().parents) if path.exists())
    disk, memory = shutil.disk_usage(there), psutil.virtual_memory()
    available, size = memory.available, memory.total
    try:
        limit = int((cgroup / "memory.max").read_text())
        statistics = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
        used = int((cgroup / "memory.current").read_text()) - int(statistics["inactive_file"])
    except (OSError, ValueError, KeyError):
        return Free(disk.free, disk.total, available, size)  # no container, or one without a limit
    return Free(disk.free, disk.total, max(0, min(available, limit - used)), min(size, limit))


class ResourceWatch:
    """Says once that a resource runs low, and again after it had recovered."""

    def __init__(self) -> None:
        self._low: set[str] = set()

    def warnings(self, free: Free) -> Iterator[str]:
        yield from self._one(
            "disk",
            free.disk < min(LOW_DISK, free.disk_size / 20),
            f"{free.disk / _GIB:.1f} GiB of the store's disk are left: make room, or the run stops when it is full",
        )
        yield from self._one(
            "memory",
            free.memory < LOW_MEMORY * free.memory_size,
            f"{free.memory / _GIB:.1f} of {free.memory_size / _GIB:.1f} GiB of memory are left: the system ends "
            "processes when it has none; fewer environment_processes, servers or loader_workers take less",
        )

    def _one(self, name: str, low: bool, text: str) -> Iterator[str]:
        if low and name not in self._low:
            yield text
        self._low = self._low | {name} if low else self._low - {name}
