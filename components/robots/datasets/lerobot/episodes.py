"""Index of a dataset's episodes and tasks, in memory-mapped files that all processes of a machine share."""

from __future__ import annotations

import hashlib
import io
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any, overload

import numpy as np
import pyarrow as pa

from armature.components.artifacts.cache import DownloadCache, make_once
from armature.components.artifacts.tables import bounded_batches, read_parquet
from armature.components.contracts.errors import DataError
from armature.components.contracts.files import foreign
from armature.components.robots.datasets.lerobot.layout import TASKS, VIDEO, DatasetFiles, DatasetInfo
from armature.components.robots.datasets.quantiles import Array

# --- Files that are written once into the cache and memory-mapped, so that all processes share their pages ---


class MappedFile(ABC):
    """A memory-mapped cache file. It is pickled as its path, and written again if it was deleted."""

    def __init__(self, kind: str, key: str) -> None:
        """Map the file, after writing it if it does not exist.

        Args:
            kind: folder in the cache.
            key: everything that the content depends on.
        """
        self._target = DownloadCache.standard().folder / kind / hashlib.sha256(key.encode()).hexdigest()[:24]
        self._open(make_once(self._target, self._write))

    def __getstate__(self) -> dict[str, Any]:
        return dict(vars(self))

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._open(make_once(self._target, self._write))

    @abstractmethod
    def _write(self, target: Path) -> None: ...

    @abstractmethod
    def _open(self, path: Path) -> None:
        """Map the file. Subclasses leave the mapping out of `__getstate__`."""


# --- Tasks of a dataset, without a Python object for each ---

FORMAT = 2
"""Version of the cache file's format. Increase it when the same dataset file would give another cache file, or when a
new check is added: cached files are not checked again."""


class TaskList(MappedFile, Mapping[int, str]):
    """Texts of meta/tasks.parquet by ascending task_index. Numbers may be missing, if a task was removed."""

    def __init__(self, files: DatasetFiles) -> None:
        """Read the tasks of a dataset.

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
        remedy = "give every task a unique number and a text, or fetch the dataset again"
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
                problem = f"task_index is {number!r:.80}, not an integer from 0 on"
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


AT_ONCE = 2**16
"""Rows of meta/episodes that are in memory while the index is written."""
_CLIP = np.dtype([("chunk", "<i8"), ("file", "<i8"), ("start", "<f8"), ("stop", "<f8")])


@dataclass(frozen=True)
class Clip:
    """Part of a video file that shows an episode. `start` and `stop` are times in seconds; `stop` is exclusive."""

    chunk: int
    file: int
    start: float
    stop: float


@dataclass(frozen=True)
class EpisodeRange:
    """One episode: frames `start` to `stop` (exclusive) of the dataset. They begin at row `row` of a data file."""

    index: int
    start: int
    stop: int
    chunk: int
    file: int
    row: int
    clips: Mapping[str, Clip]
    tasks_of: Callable[[int], tuple[str, ...]] = field(repr=False, compare=False)

    @property
    def length(self) -> int:
        """Number of frames."""
        return self.stop - self.start

    @property
    def tasks(self) -> tuple[str, ...]:
        """Task texts in meta/episodes, read when first used."""
        return self.tasks_of(self.index)


class EpisodeIndex(MappedFile, Sequence[EpisodeRange]):
    """Sequence of a dataset's episodes that creates an object only for the episodes that are accessed.

    `numbers` (episodes,) has `stop`, `row`, `chunk` and `file` of each episode and `clips` for each video: 32 bytes
    per episode, and 32 more for each video.
    """

    def __init__(self, files: DatasetFiles, info: DatasetInfo) -> None:
        """Read the index of a dataset.

        Raises:
            DataError: episodes have gaps, overlap or are empty, or the list cannot be read.
        """
        self._files = files
        self._videos = tuple(name for name, feature in info.features.items() if feature.dtype == VIDEO)
        lists = (PurePosixPath(name) for name in files.names("meta/episodes"))
        self._lists = sorted(lists, key=_number)
        kinds = [(name, "<i8") for name in ("stop", "row", "chunk", "file")]
        self._record = np.dtype([*kinds, ("clips", _CLIP, (len(self._videos),))])
        versions = map(files.version, self._lists)
        super().__init__("episodes", "\n".join([str(self._record), *self._videos, *versions]))

    def _open(self, path: Path) -> None:
        self.numbers: Array = np.load(path, mmap_mode="r")

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in super().__getstate__().items() if name not in ("numbers", "_tasks")}

    def __len__(self) -> int:
        return len(self.numbers)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, EpisodeIndex) or self._videos != other._videos:
            return False
        return np.array_equal(self.numbers, other.numbers)

    __hash__ = None  # type: ignore[assignment]

    @overload
    def __getitem__(self, index: int) -> EpisodeRange: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[EpisodeRange, ...]: ...

    def __getitem__(self, index: int | slice) -> EpisodeRange | tuple[EpisodeRange, ...]:
        if isinstance(index, slice):
            return tuple(self[each] for each in range(*index.indices(len(self))))
        number = range(len(self))[index]
        stop, row, chunk, file, clips = self.numbers[number].item()
        named = {key: Clip(*clip) for key, clip in zip(self._videos, clips, strict=True)}
        return EpisodeRange(number, self.start(number), stop, chunk, file, row, named, self._tasks_of)

    def start(self, number: int) -> int:
        """Return the first frame of an episode."""
        return int(self.numbers["stop"][number - 1]) if number else 0

    def stop(self, number: int) -> int:
        """Return the frame after the last frame of an episode."""
        return int(self.numbers["stop"][number])

    def at(self, frame: int) -> EpisodeRange:
        """Return the episode that contains a frame of the dataset."""
        return self[int(np.searchsorted(self.numbers["stop"], frame, side="right"))]

    def lengths(self, first: int, last: int) -> Array:
        """Return the numbers of frames of episodes `first` to `last` (inclusive), int64 (last - first + 1,)."""
        return np.diff(self.numbers["stop"][first : last + 1], prepend=self.start(first))

    def in_file(self, chunk: int, file: int) -> tuple[EpisodeRange, EpisodeRange]:
        """Return the first and the last episode in a data file, which must contain at least one episode."""
        here = np.flatnonzero((self.numbers["chunk"] == chunk) & (self.numbers["file"] == file))
        return self[int(here[0])], self[int(here[-1])]

    def file_starts(self, videos: Sequence[str]) -> Array:
        """Return the first frame of each file, int64 (files,).

        The files are the data files or the files of one of these `videos`, whichever are more numerous. The others have
        more episodes per file, and may end within one of these files.
        """
        changes: list[list[Array]] = [[] for _ in range(len(videos) + 1)]
        for first in range(0, len(self), AT_ONCE):
            begin = max(first - 1, 0)
            block = self.numbers[begin : first + AT_ONCE]
            clips = [block["clips"][:, self._videos.index(name)] for name in videos]
            for places, files in zip(changes, [*clips, block], strict=True):
                moved = (np.diff(files["chunk"]) != 0) | (np.diff(files["file"]) != 0)
                places.append(np.flatnonzero(moved) + begin)
        before = max(map(np.concatenate, changes), key=len)
        return np.concatenate([[0], self.numbers["stop"][before]])

    def files_of(self, episodes: Array, video: str | None) -> list[tuple[int, int]]:
        """Return the files that contain these episodes, as sorted pairs (chunk, file).

        video: the camera whose video files are returned; None: the data files.
        """
        block = self.numbers[episodes]
        files = block if video is None else block["clips"][:, self._videos.index(video)]
        return sorted(set(zip(files["chunk"].tolist(), files["file"].tolist(), strict=True)))

    def _tasks_of(self, number: int) -> tuple[str, ...]:
        return tuple(self._tasks[number].as_py() or ())

    @cached_property
    def _tasks(self) -> pa.ChunkedArray:
        parts = [table["tasks"] for path in self._lists for table in self._tables(path, ["tasks"])]
        return pa.chunked_array([chunk for part in parts for chunk in part.chunks])

    def _tables(self, name: PurePosixPath, columns: Sequence[str]) -> Iterator[pa.Table]:
        path = self._files.path(name)
        try:
            for batch in bounded_batches(path, AT_ONCE, columns=columns):
                yield pa.Table.from_batches([batch]).select(columns)
        except (OSError, KeyError, pa.ArrowException) as error:
            raise DataError(
                f"the list of episodes cannot be read: {error}",
                code="episodes_unreadable",
                where=str(path),
                remedy="meta/info.json may name videos that are not there; fetch or convert the dataset again",
            ) from error

    def _write(self, target: Path) -> None:
        parts = [f"videos/{key}/{each}" for key in self._videos for each in _COLUMNS_OF_CLIP]
        columns = ["episode_index", "data/chunk_index", "data/file_index"]
        columns += ["dataset_from_index", "dataset_to_index", *parts]
        begins: dict[tuple[int, int], int] = {}
        count, stop = 0, 0
        with target.open("wb") as file:
            file.write(_header(self._record, 0))
            for path in self._lists:
                for table in self._tables(path, columns):
                    values = _checked(table, count, stop, str(self._files.path(path)))
                    block = np.zeros(len(table), self._record)
                    start, block["stop"] = values["dataset_from_index"], values["dataset_to_index"]
                    block["chunk"], block["file"] = values["data/chunk_index"], values["data/file_index"]
                    block["row"] = start - _begins(block, start, begins)
                    for place, key in enumerate(self._videos):
                        for name, column in zip(_CLIP.names or (), _COLUMNS_OF_CLIP, strict=True):
                            block["clips"][name][:, place] = values[f"videos/{key}/{column}"]
                    file.write(block.tobytes())
                    count, stop = count + len(block), int(block["stop"][-1]) if len(block) else stop
            file.seek(0)
            file.write(_header(self._record, count))


_COLUMNS_OF_CLIP = ("chunk_index", "file_index", "from_timestamp", "to_timestamp")


def _header(record: np.dtype[Any], count: int) -> bytes:
    """Return the header of a .npy file; its length does not depend on `count`."""
    out = io.BytesIO()
    description = np.lib.format.dtype_to_descr(record)
    np.lib.format.write_array_header_1_0(out, {"descr": description, "fortran_order": False, "shape": (count,)})
    return out.getvalue()


def _begins(block: Array, start: Array, begins: dict[tuple[int, int], int]) -> Array:
    """Return, for each episode of a block, the number of the first frame in the episode's data file, (episodes,).

    `begins` has the number of the first frame by file. Files that are new in this block are added, because a file may
    have episodes of the next block too.
    """
    changes = np.flatnonzero((np.diff(block["chunk"]) != 0) | (np.diff(block["file"]) != 0)) + 1
    firsts = np.concatenate([[0], changes]) if len(block) else np.zeros(0, np.int64)
    places = ((int(block["chunk"][first]), int(block["file"][first]), int(start[first])) for first in firsts)
    firsts_of_files = [begins.setdefault((chunk, file), begin) for chunk, file, begin in places]
    return np.repeat(np.array(firsts_of_files, np.int64), np.diff(firsts, append=len(block)))


def _checked(table: pa.Table, count: int, stop: int, where: str) -> dict[str, Array]:
    """Return the table's columns as numbers. The table is a block of meta/episodes.

    Args:
        count, stop: number of episodes in all earlier blocks, and number of their frames.

    Raises:
        DataError: a value is not a number, or the block does not continue the earlier ones.
    """
    values, invalid = {}, np.zeros(len(table), bool)
    by_column = {}
    for name in table.column_names:
        values[name], by_column[name] = _numbers(table[name], name.endswith("timestamp"))
        invalid |= by_column[name]
    begin, end = values["dataset_from_index"], values["dataset_to_index"]
    before = np.concatenate([[stop], end[:-1]])
    expected = count + np.arange(len(table))
    broken = (values["episode_index"] != expected) | (begin != before) | (end <= begin)
    if not (invalid | broken).any():
        return values
    row = int(np.argmax(invalid | broken))
    (cells,) = table.slice(row, 1).to_pylist()
    if wrong := [name for name in table.column_names if by_column[name][row]]:
        raise DataError(
            f"{wrong[0]} of episode {cells['episode_index']!r:.80} is {cells[wrong[0]]!r:.80}",
            code="invalid_episode_number",
            where=where,
            remedy="it must be a number from 0 on; fetch the dataset again",
        )
    raise DataError(
        f"episode {cells['episode_index']} has the frames {begin[row]} to {end[row]}; "
        f"episode {expected[row]} is expected here, starting at {before[row]}",
        code="episodes_not_contiguous",
        where=where,
        remedy="an episode is empty, missing or listed twice; remove or record it again with lerobot",
    )


def _numbers(column: pa.ChunkedArray, fractions: bool) -> tuple[Array, Array]:
    """Return the column as numbers, and a mask of invalid entries (missing, negative, NaN or infinite).

    All entries are invalid if the column has another type, such as fractions where `fractions` is False.
    """
    kind = np.float64 if fractions else np.int64
    if not pa.types.is_integer(column.type) and not (fractions and pa.types.is_floating(column.type)):
        return np.zeros(len(column), kind), np.ones(len(column), bool)
    missing = column.is_null().to_numpy()
    values = column.fill_null(0).to_numpy().astype(kind)  # numbers too large for int64 become negative
    return values, missing | ~((values >= 0) & (values < np.inf))


def _number(path: PurePosixPath) -> tuple[int, str, int, str]:
    """Return a sort key that puts chunk-1000 after chunk-999."""
    return len(path.parent.name), path.parent.name, len(path.name), path.name
