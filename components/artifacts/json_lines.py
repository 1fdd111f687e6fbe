"""Records that are appended one by one, so that a crash loses none."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from armature.components.artifacts.disk import raising_disk_full
from armature.components.contracts.metrics import dump_json, read_floats

BLOCK = 4096


class JsonLines:
    """One JSON object a line. Thread safe; one process writes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()

    def append(self, row: bytes) -> None:
        """Add one JSON document without line breaks; it is on the disk when this returns.

        Raises:
            StoreError: the disk is full; the next row takes the place of what was written.
        """
        with raising_disk_full(self.path), self._lock, self.path.open("a+b") as file:
            file.truncate(_end_of_last_line(file))  # a line that a crash cut off would spoil this one
            file.write(row + b"\n")
            file.flush()
            os.fsync(file.fileno())

    def read(self) -> list[dict[str, Any]]:
        """All rows in the order in which they were added; a line that a crash cut off is none."""
        if not self.path.exists():
            return []
        return [json.loads(line) for line in self.path.read_bytes().split(b"\n")[:-1]]


def _end_of_last_line(file: IO[bytes]) -> int:
    """The number of bytes up to the last line break; reads no more than what follows it."""
    end = file.seek(0, os.SEEK_END)
    size = 1  # nearly always enough
    while end:
        start = max(0, end - size)
        file.seek(start)
        if (found := file.read(end - start).rfind(b"\n")) >= 0:
            return start + found + 1
        end, size = start, BLOCK
    return 0


# The numbers of every step, kept line by line so that a crash loses none.


class History:
    """One JSON object a line with its `step`. A step that was replayed after a crash has its last line count."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lines = JsonLines(path)

    def append(self, step: int, values: Mapping[str, float]) -> None:
        self._lines.append(dump_json({"step": step, **values}))

    def read(self) -> list[dict[str, float]]:
        """The steps in order."""
        by_step = {row["step"]: read_floats(row) | {"step": row["step"]} for row in self._lines.read()}
        return [by_step[step] for step in sorted(by_step)]
