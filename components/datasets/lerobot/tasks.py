"""The tasks of a dataset by their number, without an object for each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from armature.components.artifacts.parquet import read_parquet
from armature.components.contracts.errors import DataError
from armature.components.contracts.foreign import foreign
from armature.components.datasets.lerobot.files import DatasetFiles
from armature.components.datasets.lerobot.layout import TASKS
from armature.components.datasets.lerobot.mapped import MappedFile

FORMAT = 2
"""Raised when the same file gives another list, or is checked for more."""


class TaskList(MappedFile, Mapping[int, str]):
    """Texts of meta/tasks.parquet by task_index, ascending; numbers may be missing, as where a task was removed."""

    def __init__(self, files: DatasetFiles) -> None:
        """
        Raises:
            DataError: the file cannot be read, or a number or a text is invalid.
        """
        self._path = files.path(TASKS)
        super().__init__("tasks", f"{FORMAT}\n{files.version(TASKS)}")

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in super().__getstate__().items() if name not in ("_numbers", "_texts")}

    def _open(self, path: Path) -> None:
        table = pa.ipc.open_file(pa.memory_map(str(path))).read_all()
        self._numbers, self._texts = table["task_index"].to_numpy(), table["task"]

    def __len__(self) -> int:
        return len(self._numbers)

    def __iter__(self) -> Iterator[int]:
        return iter(self._numbers.tolist())

    def __getitem__(self, number: int) -> str:
        place = int(np.searchsorted(self._numbers, number))
        if place == len(self) or self._numbers[place] != number:
            raise KeyError(number)
        return str(self._texts[place].as_py())

    def _write(self, target: Path) -> None:
        remedy = "give every task a number of its own and a text, or fetch the dataset again"
        with foreign("the tasks cannot be read", where=str(self._path), remedy=remedy):
            frame = read_parquet(self._path).to_pandas()
            numbers = frame["task_index"].tolist() if "task_index" in frame.columns else None
            texts = list(frame["task"] if "task" in frame.columns else frame.index)
        if numbers is None:
            raise DataError(
                "the tasks have no column 'task_index'", code="column_missing", where=str(self._path), remedy=remedy
            )
        listed: dict[int, str] = {}
        for row, (number, text) in enumerate(zip(numbers, texts, strict=True)):
            problem = ""
            if type(number) is not int or not 0 <= number < 2**63:
                problem = f"task_index is {number!r:.80}, not a whole number from 0 on"
            elif number in listed:
                problem = f"task_index {number} is listed twice"
            elif not isinstance(text, str):
                problem = f"the text of task {number} is {text!r:.80}"
            if problem:
                raise DataError(problem, code="invalid_task", where=f"{self._path}, row {row}", remedy=remedy)
            listed[number] = text
        order = sorted(listed)
        columns = {
            "task_index": pa.array(order, pa.int64()),
            "task": pa.array(map(listed.get, order), pa.large_string()),
        }
        table = pa.table(columns)
        with pa.ipc.new_file(str(target), table.schema) as writer:
            writer.write_table(table)
