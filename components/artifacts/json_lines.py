"""Files with one JSON object a line, written so that a crash loses no finished line."""

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
"""Bytes read at a time while searching backward for the last line break."""


class JsonLines:
    """A file of JSON objects, one a line. Threads may share an instance; only one process may write.

    Example:
        >>> import tempfile
        >>> rows = JsonLines(Path(tempfile.mkdtemp(), "rows.jsonl"))
        >>> rows.append(b'{"step": 1}')
        >>> rows.read()
        [{'step': 1}]
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()

    def append(self, row: bytes) -> None:
        """Append one JSON document without line breaks, and wait until it is on the disk.

        Raises:
            StoreError: the disk is full. The next row overwrites the incomplete line.
        """
        with raising_disk_full(self.path), self._lock, self.path.open("a+b") as file:
            file.truncate(_end_of_last_line(file))  # remove an incomplete last line that a crash left
            file.write(row + b"\n")
            file.flush()
            os.fsync(file.fileno())

    def read(self) -> list[dict[str, Any]]:
        """Return all rows in the order they were appended, without an incomplete last line that a crash left."""
        if not self.path.exists():
            return []
        return [json.loads(line) for line in self.path.read_bytes().split(b"\n")[:-1]]


def _end_of_last_line(file: IO[bytes]) -> int:
    """Return the offset just after the last line break, reading only the bytes that follow it."""
    end = file.seek(0, os.SEEK_END)
    size = 1  # nearly always enough
    while end:
        start = max(0, end - size)
        file.seek(start)
        if (newline := file.read(end - start).rfind(b"\n")) >= 0:
            return start + newline + 1
        end, size = start, BLOCK
    return 0


class History:
    """Metrics of each training step, one JSON object a line. If a step was repeated after a crash, its last line
    counts."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lines = JsonLines(path)

    def append(self, step: int, values: Mapping[str, float]) -> None:
        """Append the metrics of one step."""
        self._lines.append(dump_json({"step": step, **values}))

    def read(self) -> list[dict[str, float]]:
        """Return the metrics of every step, in ascending order of steps."""
        by_step = {row["step"]: read_floats(row) | {"step": row["step"]} for row in self._lines.read()}
        return [by_step[step] for step in sorted(by_step)]
