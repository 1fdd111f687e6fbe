"""The numbers of every step, kept line by line so that a crash loses none."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from armature.components.artifacts.json_lines import JsonLines
from armature.components.contracts.numbers import dump_json, read_floats


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
