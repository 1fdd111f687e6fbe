"""Records that are appended one by one, so that a crash loses none."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import Any


class JsonLines:
    """One JSON object a line. Thread safe; one process writes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()

    def append(self, row: bytes) -> None:
        """Add one JSON document without line breaks; it is on the disk when this returns."""
        with self._lock, self.path.open("a+b") as file:
            file.seek(0)
            file.truncate(file.read().rfind(b"\n") + 1)  # a line that a crash cut off would spoil this one
            file.write(row + b"\n")
            file.flush()
            os.fsync(file.fileno())

    def read(self) -> list[dict[str, Any]]:
        """All rows in the order in which they were added; a line that a crash cut off is none."""
        if not self.path.exists():
            return []
        return [json.loads(line) for line in self.path.read_bytes().split(b"\n")[:-1]]
