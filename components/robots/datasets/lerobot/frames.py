"""Random access to the frames of a dataset: memory-mapped columns and videos that stay open."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import pyarrow as pa

from armature.components.artifacts.cache import DownloadCache, make_once
from armature.components.contracts.errors import DataError
from armature.components.robots.datasets.lerobot.episodes import EpisodeRange
from armature.components.robots.datasets.lerobot.language import Subtasks, read_subtasks, subtask_at
from armature.components.robots.datasets.lerobot.layout import VIDEO
from armature.components.robots.datasets.lerobot.reader import Dataset, window
from armature.components.robots.datasets.lerobot.video import VideoReaders
from armature.components.robots.datasets.quantiles import Array

SMALL = 1 << 30
"""If a dataset's decoded frames take at most this many bytes, its videos are decoded once and kept in the cache."""
FORMAT = 2
"""Version of the cache files' format. Increase it when the same dataset file would give another cache file, or when a
new check is added: cached files are not checked again."""
PAGE = 4096
"""Minimum size in bytes that is assumed for a frame."""


class FrameReader:
    """Reads single frames of a dataset.

    Each column of a data file is written once, uncompressed, into the cache and memory-mapped: processes share its
    pages, and memory does not grow with the dataset. The decoded videos of a small dataset are cached in the same way,
    because seeking, decoding and converting a frame takes most of a sample's time. Open files are not pickled.
    """

    def __init__(self, dataset: Dataset, cache: DownloadCache) -> None:
        self.dataset, self._cache = dataset, cache
        info = dataset.info
        sizes = [max(math.prod(each.shape), PAGE) for each in info.features.values() if each.dtype == VIDEO]
        self._small = info.total_frames * sum(sizes) <= SMALL
        self._forget()

    def __getstate__(self) -> dict[str, Any]:
        return {"dataset": self.dataset, "_cache": self._cache, "_small": self._small}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._forget()

    def _forget(self) -> None:
        self._columns: dict[tuple[int, int, str], Any] = {}
        self._videos = VideoReaders()
        self._clips: dict[tuple[str, int], Array | None] = {}
        self._subtasks: dict[int, Subtasks] = {}

    def numbers(self, name: str, episode: EpisodeRange, places: Array) -> Array:
        """Return a numeric feature at the frames `places` of the episode, (places, width).

        Raises:
            DataError: the data file is damaged or inconsistent.
        """
        rows: Array = self._column(name, episode)[episode.row + places]
        return rows

    def image(self, name: str, episode: EpisodeRange, frame: int) -> Array:
        """Return a camera's image, uint8 RGB (height, width, 3).

        Raises:
            DataError: the image is missing or damaged.
        """
        dataset = self.dataset
        if dataset.feature(name).dtype == VIDEO:
            if self._small and (decoded := self._decoded(name, episode)) is not None:
                return np.array(decoded[frame])
            row = self.numbers("timestamp", episode, np.array([frame]))[:, 0]
            (time,), tolerance = dataset.video_times(name, episode, [frame], row)
            where = f"episode {episode.index}, frame {frame}"
            return self._videos.at(dataset.video(name, episode)).frame(float(time), tolerance, where)
        stored = self._column(name, episode)[episode.row + frame].as_py()
        return np.asarray(dataset.decoded(name, episode, frame, stored))

    def item(self, index: int, windows: Mapping[str, Sequence[float]]) -> dict[str, Any]:
        """Return frame `index` of the dataset as LeRobot does: features, images and the task.

        Args:
            windows: times in seconds relative to the frame, by feature. Such a feature has an additional first
                dimension, and `<feature>_is_pad` marks times outside of the episode.

        Raises:
            IndexError: the dataset has no such frame.
        """
        dataset = self.dataset
        if not 0 <= index < dataset.info.total_frames:
            raise IndexError(f"frame {index} of {dataset.info.total_frames}")
        episode = dataset.episode_at(index)
        frame, item = index - episode.start, {}
        for name, feature in dataset.info.features.items():
            times = windows.get(name)
            places, padding = window(frame, episode.length, dataset.offsets(times or [0.0]))
            if feature.is_number:
                values = self.numbers(name, episode, places).reshape(len(places), *feature.shape)
            elif feature.is_visual:
                shown = {place: self.image(name, episode, place) for place in sorted(set(places.tolist()))}
                values = np.stack([shown[place] for place in places.tolist()])
            else:
                continue
            item[name] = values if times is not None else values[0]
            if times is not None:
                item[f"{name}_is_pad"] = padding
        return {**item, "task": self.task(episode, frame)}

    def task(self, episode: EpisodeRange, frame: int) -> str:
        """Return the text of the task at a frame.

        Raises:
            DataError: the frame's task_index is not in meta/tasks.parquet.
        """
        number = int(self.numbers("task_index", episode, np.array([frame]))[0, 0])
        if number not in self.dataset.tasks:
            raise DataError(
                f"task_index {number} is not one of the {len(self.dataset.tasks)} tasks in meta/tasks.parquet",
                code="unknown_task_index",
                where=f"{self.dataset.files}, episode {episode.index}, frame {frame}",
                remedy="meta/tasks.parquet and the data files do not belong together; fetch the dataset again",
            )
        return self.dataset.tasks[number]

    def subtask(self, episode: EpisodeRange, frame: int) -> str:
        """Return the text of the subtask that is active at a frame.

        Raises:
            DataError: none is active at the frame, or the episode's subtasks are damaged.
        """
        if episode.index not in self._subtasks:
            self._subtasks[episode.index] = read_subtasks(self.dataset, episode)
        time = float(self.numbers("timestamp", episode, np.array([frame]))[0, 0])
        return subtask_at(self._subtasks[episode.index], time, self.dataset, episode, frame)

    def _column(self, name: str, episode: EpisodeRange) -> Any:
        """Return a column of the whole data file: an array (rows, width) of numbers, or Arrow cells with images."""
        key = (episode.chunk, episode.file, name)
        if key not in self._columns:
            self._columns[key] = self._mapped(name, episode)
        return self._columns[key]

    def _decoded(self, name: str, episode: EpisodeRange) -> Array | None:
        """Return all frames of a camera's video of the episode, decoded, (frames, height, width, 3).

        None if a frame is damaged. Frames are then decoded one by one, so that only reading the damaged one fails.
        """
        key = (name, episode.index)
        if key not in self._clips:
            clip, info = episode.clips[name], self.dataset.info
            source = info.video_file(name, clip.chunk, clip.file)
            try:
                rows = self.numbers("timestamp", episode, np.arange(episode.length))[:, 0]
                times, _ = self.dataset.video_times(name, episode, range(episode.length), rows)
                target = self._cached(source, info.features[name].shape, times.tobytes())
                made = make_once(target, partial(self._decode, name, episode, rows))
                self._clips[key] = np.load(made, mmap_mode="r")
            except DataError:
                self._clips[key] = None
        return self._clips[key]

    def _decode(self, name: str, episode: EpisodeRange, timestamps: Array, target: Path) -> None:
        shape = tuple(self.dataset.feature(name).shape)
        frames = np.empty((episode.length, *shape), np.uint8)
        for number, image in enumerate(self.dataset.images(name, episode, range(episode.length), timestamps)):
            pixels = np.asarray(image)
            if pixels.shape != shape:
                raise DataError(
                    f"an image has the shape {pixels.shape}, meta/info.json has {shape}",
                    code="frame_shape_mismatch",
                    where=f"{name}, frame {number}",
                )
            frames[number] = pixels
        with target.open("wb") as file:
            np.save(file, frames)

    def _cached(self, source: PurePosixPath, *facts: object) -> Path:
        """Return the path in the cache for content that is computed from a dataset file.

        The path depends on the version of the file `source` and on `facts`, which must have everything else that the
        content depends on.
        """
        made_of = repr((FORMAT, self.dataset.files.version(source), *facts))
        return self._cache.folder / "columns" / hashlib.sha256(made_of.encode()).hexdigest()

    def _mapped(self, name: str, episode: EpisodeRange) -> Any:
        """Return a column of the episode's data file, memory-mapped from the cache.

        The cache key includes everything that the rows are checked against, so a cached column needs no check.
        """
        dataset, feature = self.dataset, self.dataset.feature(name)
        first, last = dataset.episodes.in_file(episode.chunk, episode.file)
        lengths = dataset.episodes.lengths(first.index, last.index).tobytes()
        rows = (first.index, first.start, first.row, lengths, dataset.info.fps)
        source = dataset.info.data_file(episode.chunk, episode.file)
        target = self._cached(source, name, feature.dtype, feature.shape, *rows)
        make_once(target, partial(self._write, name, first, last, feature.is_number))
        if feature.is_number:
            return np.load(target, mmap_mode="r")
        return pa.ipc.open_file(pa.memory_map(str(target))).read_all()[name]

    def _write(self, name: str, first: EpisodeRange, last: EpisodeRange, number: bool, target: Path) -> None:
        """Write the cache file `target`: a column of the data file that has the episodes from `first` to `last`."""
        with target.open("wb") as file:
            if number:
                np.save(file, self.dataset.columns([name], first, last)[name])
                return
            table = self.dataset.table(first, [name], last).select([name])
            with pa.ipc.new_file(file, table.schema) as writer:
                writer.write_table(table)
