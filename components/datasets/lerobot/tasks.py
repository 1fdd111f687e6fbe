"""The tasks of a dataset by their number, without an object for each."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, overload

import pandas as pd
import pyarrow as pa

from components.contracts.errors import DataError
from components.datasets.lerobot.files import DatasetFiles
from components.datasets.lerobot.layout import TASKS
from components.datasets.lerobot.mapped import MappedFile


class TaskList(MappedFile, Sequence[str]):
    """meta/tasks.parquet, in the order of task_index."""

    def __init__(self, files: DatasetFiles) -> None:
        """
        Raises:
            DataError: it cannot be read, or a number is missing or there twice.
        """
        self._path = files.path(TASKS)
        super().__init__("tasks", files.version(TASKS))

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in super().__getstate__().items() if name != "_names"}

    def _open(self, path: Path) -> None:
        self._names = pa.ipc.open_file(pa.memory_map(str(path))).read_all()["task"]

    def __len__(self) -> int:
        return len(self._names)

    @overload
    def __getitem__(self, index: int) -> str: ...

    @overload
    def __getitem__(self, index: slice) -> list[str]: ...

    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return [str(each) for each in self._names[index].to_pylist()]
        return str(self._names[range(len(self))[index]].as_py())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]

    def _write(self, target: Path) -> None:
        try:
            frame = pd.read_parquet(self._path)
            names = frame["task"] if "task" in frame.columns else frame.index
            listed = dict(zip(frame["task_index"].tolist(), map(str, names), strict=True))
            table = pa.table({"task": pa.array([listed[number] for number in range(len(frame))], pa.large_string())})
        except (OSError, KeyError, ValueError, pa.ArrowException) as error:
            raise DataError(f"the tasks cannot be read: {error!r}", where=str(self._path)) from error
        with pa.ipc.new_file(str(target), table.schema) as writer:
            writer.write_table(table)
