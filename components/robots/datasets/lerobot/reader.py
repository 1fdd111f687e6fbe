"""A LeRobotDataset v3.0: its episodes, columns, images, and windows over time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import IO, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from armature.components.artifacts.images import decode
from armature.components.artifacts.tables import read_parquet
from armature.components.contracts.errors import ConfigurationError, DataError
from armature.components.contracts.images import EncodedImage
from armature.components.robots.datasets.lerobot.columns import PLACES, TOLERANCE, ExpectedRows, to_numpy
from armature.components.robots.datasets.lerobot.episodes import EpisodeIndex, EpisodeRange, TaskList
from armature.components.robots.datasets.lerobot.layout import (
    IMAGE,
    INFO,
    STATS,
    VIDEO,
    DatasetFiles,
    DatasetInfo,
    Feature,
    LocalFiles,
    read_info,
    read_stats,
)
from armature.components.robots.datasets.lerobot.video import VideoFile, read_frames
from armature.components.robots.datasets.quantiles import Array


@dataclass(frozen=True)
class Dataset:
    """Opened by `open_dataset`, which has checked that the episodes follow one another."""

    files: DatasetFiles
    info: DatasetInfo
    episodes: EpisodeIndex
    tasks: TaskList

    @property
    def root(self) -> Path:
        """The folder that the files are in, or are fetched to."""
        return self.files.root

    @cached_property
    def stats(self) -> dict[str, Any]:
        """meta/stats.json, empty where there is none.

        Raises:
            DataError: it is not a JSON object of finite numbers.
        """
        return read_stats(self.files.path(STATS)) if self.files.has(STATS) else {}

    def video(self, name: str, episode: EpisodeRange) -> VideoFile:
        """A camera's video file with the episode."""
        clip = episode.clips[name]
        file = self.info.video_file(name, clip.chunk, clip.file)
        return VideoFile(f"{self.files}/{file}", partial(self.files.view, file, whole=True))

    def episode_at(self, index: int) -> EpisodeRange:
        """The episode that frame `index` of the dataset belongs to."""
        return self.episodes.at(index)

    def feature(self, name: str) -> Feature:
        """
        Raises:
            ConfigurationError: there is none of that name.
        """
        if name not in self.info.features:
            known = ", ".join(self.info.features)
            raise ConfigurationError(
                f"no feature is called {name!r}",
                code="unknown_feature",
                where=str(self.files),
                remedy=f"known: {known}",
            )
        return self.info.features[name]

    def table(self, episode: EpisodeRange, names: Sequence[str], last: EpisodeRange | None = None) -> pa.Table:
        """These columns of `episode`, or of all episodes to `last`, which is in the same file.

        Raises:
            DataError: the file or a column is missing, or the rows are not the episodes', one after another.
        """
        last = last or episode
        name = self.info.data_file(episode.chunk, episode.file)
        path = f"{self.files}/{name}"
        stored = {key for key, feature in self.info.features.items() if feature.dtype == IMAGE}
        try:
            # numbers beside images are a small part of the file
            with self.files.view(name, whole=not stored or bool(stored & set(names))) as file:
                columns = sorted({*PLACES, *names})
                skipped, whole = _rows(file, columns, episode.row, last.stop - episode.start)
        except (OSError, pa.ArrowException) as error:
            raise DataError(
                f"the data file cannot be read: {error}",
                code="data_file_unreadable",
                where=f"{path}, episode {episode.index}",
            ) from error
        if missing := sorted({*names} - set(whole.column_names)):
            raise DataError(f"the data file has no column {missing[0]!r}", code="column_missing", where=str(path))
        table = whole.slice(episode.row - skipped, last.stop - episode.start)
        lengths = self.episodes.lengths(episode.index, last.index)
        ExpectedRows(episode.index, episode.start, lengths, self.info.fps).check(table, path, episode.row)
        return table

    def columns(
        self, names: Sequence[str], episode: EpisodeRange, last: EpisodeRange | None = None
    ) -> dict[str, Array]:
        """Numeric features as (frames, width)."""
        table = self.table(episode, names, last)
        where = f"{self.files}/{self.info.data_file(episode.chunk, episode.file)}, from episode {episode.index}"
        return {name: to_numpy(table[name], name, self.feature(name), where) for name in names}

    def video_times(
        self, name: str, episode: EpisodeRange, frames: Sequence[int], timestamps: Array
    ) -> tuple[Array, float]:
        """Seconds of `frames` in a camera's video by their `timestamps` (frames,), and how far off they may be.

        As LeRobot has it: a row shows the frame at the clip's beginning plus the row's time.

        Raises:
            DataError: one lies behind the clip's end, where the frames of another episode are.
        """
        clip = episode.clips[name]
        times = clip.start + timestamps.astype(np.float64)
        tolerance = TOLERANCE + (float(np.spacing(timestamps.max())) / 2 if timestamps.dtype.kind == "f" else 0.0)
        if (late := times >= clip.stop - tolerance).any():
            at = int(np.argmax(late))
            raise DataError(
                f"the row has the time {timestamps[at]:.9g} s, and its video only {clip.stop - clip.start:.9g} s",
                code="row_after_video",
                where=f"{self.video(name, episode).name}, episode {episode.index}, row {episode.row + frames[at]}",
                remedy="correct from_timestamp and to_timestamp in meta/episodes, or the rows' timestamp",
            )
        return times, tolerance

    def images(
        self, name: str, episode: EpisodeRange, frames: Sequence[int], timestamps: Array | None = None
    ) -> Iterator[Image.Image]:
        """RGB images of a camera at these frames of the episode, ascending.

        Args:
            timestamps: Of all rows of the episode, where they were read before; (frames,).

        Raises:
            DataError: one is missing or damaged.
        """
        if self.feature(name).dtype == VIDEO:
            if timestamps is None:
                timestamps = self.columns(["timestamp"], episode)["timestamp"][:, 0]
            times, tolerance = self.video_times(name, episode, frames, timestamps[list(frames)])
            yield from read_frames(self.video(name, episode), times.tolist(), tolerance, f"episode {episode.index}")
            return
        column = self.table(episode, [name])[name].take(list(frames))
        for frame, stored in zip(frames, column, strict=True):
            yield self.decoded(name, episode, frame, stored.as_py())

    def decoded(self, name: str, episode: EpisodeRange, frame: int, stored: Any) -> Image.Image:
        """The RGB image of a data file's cell.

        Raises:
            DataError: it is not an image.
        """
        try:
            data = stored["bytes"] or b""
            return decode(EncodedImage(data, media_type(data)))
        except (DataError, KeyError, TypeError) as error:
            where = f"{self.files}, episode {episode.index}, frame {frame}, {name!r}"
            raise DataError(f"not a readable image: {error}", code="image_unreadable", where=where) from error

    def windows(self, name: str, episode: EpisodeRange, offsets: Sequence[int]) -> tuple[Array, Array]:
        """For each frame the feature at `offsets` frames from it: (frames, offsets, width), and which are padding.

        Beyond the episode's ends its first or last frame stands, marked True.
        """
        values = self.columns([name], episode)[name]
        places, padding = window(np.arange(episode.length)[:, None], episode.length, offsets)
        return values[places], padding

    def offsets(self, times: Sequence[float]) -> list[int]:
        """Times in seconds as frames.

        Raises:
            ConfigurationError: one is not a multiple of a frame.
        """
        frames = [round(time * self.info.fps) for time in times]
        for time, number in zip(times, frames, strict=True):
            if abs(time - number / self.info.fps) > TOLERANCE:
                raise ConfigurationError(
                    f"{time} s is not a whole number of frames at {self.info.fps} per second",
                    code="time_between_frames",
                )
        return frames


def window(frame: int | Array, length: int, offsets: Sequence[int]) -> tuple[Array, Array]:
    """Frames at `offsets` from `frame`, kept within an episode of `length`, and which had to be."""
    places = np.asarray(frame) + np.asarray(offsets, np.int64)
    kept = np.clip(places, 0, length - 1)
    return kept, places != kept


def open_dataset(files: DatasetFiles | Path) -> Dataset:
    """
    Args:
        files: Where its files are; a path is a folder.

    Raises:
        DataError: not such a dataset, or its episodes leave gaps, overlap, are empty or are not as many as it says.
    """
    files = LocalFiles(files.absolute()) if isinstance(files, Path) else files
    info = read_info(files.path(INFO))
    episodes = EpisodeIndex(files, info)
    frames = episodes[-1].stop if episodes else 0
    if (len(episodes), frames) != (info.total_episodes, info.total_frames) or not episodes:
        raise DataError(
            f"{len(episodes)} episodes of {frames} frames are listed, "
            f"meta/info.json says {info.total_episodes} of {info.total_frames}",
            code="episode_count_mismatch",
            where=f"{files}/meta/episodes",
        )
    return Dataset(files, info, episodes, TaskList(files))


def media_type(data: bytes) -> str:
    """By the file's first bytes."""
    if data.startswith(b"\x89PNG"):
        return "image/png"
    if data.startswith(b"\xff\xd8"):
        return "image/jpeg"
    return "image/webp" if data[8:12] == b"WEBP" else "unknown"


def _rows(source: Path | IO[bytes], names: Sequence[str], first: int, count: int) -> tuple[int, pa.Table]:
    """The row groups that hold `count` rows from row `first` on, and how many rows lie before them."""
    with pq.ParquetFile(source, pre_buffer=True) as file:
        sizes = [file.metadata.row_group(group).num_rows for group in range(file.metadata.num_row_groups)]
        ends = np.cumsum(sizes)
        groups = [g for g, end in enumerate(ends) if end > first and end - sizes[g] < first + count]
        skipped = int(ends[groups[0]] - sizes[groups[0]]) if groups else first
    return skipped, read_parquet(source, row_groups=groups, columns=list(names))
