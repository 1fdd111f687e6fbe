"""The numbers of every step, kept line by line so that a crash loses none."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

from components.contracts.numbers import dump_json, read_floats


class History:
    """One JSON object a line with its `step`. A step that was replayed after a crash has its last line count."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def append(self, step: int, values: Mapping[str, float]) -> None:
        with self.path.open("a+b") as file:
            file.seek(0)
            kept = file.read().rfind(b"\n") + 1
            file.truncate(kept)  # a line that a crash cut off would spoil this one
            file.write(dump_json({"step": step, **values}) + b"\n")
            file.flush()
            os.fsync(file.fileno())

    def read(self) -> list[dict[str, float]]:
        """The steps in order; a line that a crash cut off is not a step."""
        if not self.path.exists():
            return []
        by_step: dict[int, dict[str, float]] = {}
        for line in self.path.read_text().splitlines(keepends=True):
            if line.endswith("\n"):
                values = json.loads(line)
                by_step[values["step"]] = read_floats(values) | {"step": values["step"]}
        return [by_step[step] for step in sorted(by_step)]
