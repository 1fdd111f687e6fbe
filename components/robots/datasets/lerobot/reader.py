"""Reader of a LeRobotDataset v3.0 or v3.1: episodes, columns, images, and windows over time."""

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
from armature.components.robots.datasets.lerobot.columns import AGAIN, PLACES, TOLERANCE, ExpectedRows, to_numpy
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
    """A dataset opened by `open_dataset`, which has checked that its episodes are contiguous.

    Example:
        >>> def first_actions(folder: Path) -> Array:
        ...     dataset = open_dataset(folder)
        ...     return dataset.columns(["action"], dataset.episodes[0])["action"]
    """

    files: DatasetFiles
    info: DatasetInfo
    episodes: EpisodeIndex
    tasks: TaskList

    @property
    def root(self) -> Path:
        """Folder that the files are in, or are downloaded to."""
        return self.files.root

    @cached_property
    def stats(self) -> dict[str, Any]:
        """Content of meta/stats.json; empty if the file does not exist.

        Raises:
            DataError: the file is not a JSON object of finite numbers.
        """
        return read_stats(self.files.path(STATS)) if self.files.has(STATS) else {}

    def video(self, name: str, episode: EpisodeRange) -> VideoFile:
        """Return the video file of a camera that contains the episode."""
        clip = episode.clips[name]
        file = self.info.video_file(name, clip.chunk, clip.file)
        return VideoFile(f"{self.files}/{file}", partial(self.files.view, file, whole=True))

    def episode_at(self, index: int) -> EpisodeRange:
        """Return the episode that contains frame `index` of the dataset."""
        return self.episodes.at(index)

    def feature(self, name: str) -> Feature:
        """Return a feature by name.

        Raises:
            ConfigurationError: there is no feature of that name.
        """
        if name not in self.info.features:
            raise ConfigurationError(
                f"the dataset has no feature {name!r}",
                code="unknown_feature",
                where=str(self.files),
                remedy=f"choose among {', '.join(self.info.features)}",
            )
        return self.info.features[name]

    def table(self, episode: EpisodeRange, names: Sequence[str], last: EpisodeRange | None = None) -> pa.Table:
        """Return columns of `episode`, or of all episodes from there to `last`, which must be in the same file.

        Raises:
            DataError: the file or a column is missing, or the rows are not the expected ones.
        """
        last = last or episode
        name = self.info.data_file(episode.chunk, episode.file)
        path = f"{self.files}/{name}"
        stored = {key for key, feature in self.info.features.items() if feature.dtype == IMAGE}
        try:
            # Numbers that are stored beside images are a small part of the file, so it is not downloaded as a whole.
            with self.files.view(name, whole=not stored or bool(stored & set(names))) as file:
                columns = sorted({*PLACES, *names})
                skipped, whole = _rows(file, columns, episode.row, last.stop - episode.start)
        except (OSError, pa.ArrowException) as error:
            raise DataError(
                f"the data file cannot be read: {error}",
                code="data_file_unreadable",
                where=f"{path}, episode {episode.index}",
                remedy=AGAIN,
            ) from error
        if missing := sorted({*names} - set(whole.column_names)):
            raise DataError(
                f"the data file has no column {missing[0]!r}", code="column_missing", where=path, remedy=AGAIN
            )
        table = whole.slice(episode.row - skipped, last.stop - episode.start)
        lengths = self.episodes.lengths(episode.index, last.index)
        ExpectedRows(episode.index, episode.start, lengths, self.info.fps).check(table, path, episode.row)
        return table

    def columns(
        self, names: Sequence[str], episode: EpisodeRange, last: EpisodeRange | None = None
    ) -> dict[str, Array]:
        """Return numeric features as (frames, width)."""
        table = self.table(episode, names, last)
        where = f"{self.files}/{self.info.data_file(episode.chunk, episode.file)}, from episode {episode.index}"
        return {name: to_numpy(table[name], name, self.feature(name), where) for name in names}

    def video_times(
        self, name: str, episode: EpisodeRange, frames: Sequence[int], timestamps: Array
    ) -> tuple[Array, float]:
        """Return the times in seconds of `frames` in a camera's video, and their tolerance.

        As in LeRobot, a row shows the video frame at the start of the episode's clip plus the row's time.

        Args:
            timestamps: the rows' times in the episode, (frames,).

        Raises:
            DataError: a time is after the end of the clip, where frames of another episode are.
        """
        clip = episode.clips[name]
        times = clip.start + timestamps.astype(np.float64)
        tolerance = TOLERANCE + (float(np.spacing(timestamps.max())) / 2 if timestamps.dtype.kind == "f" else 0.0)
        if (late := times >= clip.stop - tolerance).any():
            at = int(np.argmax(late))
            raise DataError(
                f"the row has the time {timestamps[at]:.9g} s, but its video only has {clip.stop - clip.start:.9g} s",
                code="row_after_video",
                where=f"{self.video(name, episode).name}, episode {episode.index}, row {episode.row + frames[at]}",
                remedy="correct from_timestamp and to_timestamp in meta/episodes, or the rows' timestamp",
            )
        return times, tolerance

    def images(
        self, name: str, episode: EpisodeRange, frames: Sequence[int], timestamps: Array | None = None
    ) -> Iterator[Image.Image]:
        """Yield RGB images of a camera at these ascending frames of the episode.

        Args:
            timestamps: times of all rows of the episode, (frames,), if they have been read before.

        Raises:
            DataError: an image is missing or damaged.
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
        """Return the RGB image that is stored as a file in a cell of a data file's column.

        Raises:
            DataError: the cell is not an image.
        """
        try:
            data = stored["bytes"] or b""
            return decode(EncodedImage(data, media_type(data)))
        except (DataError, KeyError, TypeError) as error:
            where = f"{self.files}, episode {episode.index}, frame {frame}, {name!r}"
            raise DataError(
                f"the image cannot be read: {error}", code="image_unreadable", where=where, remedy=AGAIN
            ) from error

    def windows(self, name: str, episode: EpisodeRange, offsets: Sequence[int]) -> tuple[Array, Array]:
        """Return a window of the feature around each frame of the episode, and a padding mask.

        The windows (frames, offsets, width) have the values at each frame's number plus `offsets`. Beyond the ends of
        the episode its first or last frame is repeated, and the mask (frames, offsets) is True.
        """
        values = self.columns([name], episode)[name]
        places, padding = window(np.arange(episode.length)[:, None], episode.length, offsets)
        return values[places], padding

    def offsets(self, times: Sequence[float]) -> list[int]:
        """Return times in seconds as numbers of frames.

        Raises:
            ConfigurationError: a time is not a multiple of the frame duration.
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
    """Return the frame numbers `frame` + `offsets`, and a mask of the numbers that had to be clamped.

    Numbers are clamped to 0 to `length` - 1, the frames of the episode.

    Example:
        >>> places, padding = window(3, length=5, offsets=[0, 1, 2])
        >>> places.tolist(), padding.tolist()
        ([3, 4, 4], [False, False, True])
    """
    places = np.asarray(frame) + np.asarray(offsets, np.int64)
    clamped = np.clip(places, 0, length - 1)
    return clamped, places != clamped


def open_dataset(files: DatasetFiles | Path) -> Dataset:
    """Open a dataset and check its index of episodes.

    Args:
        files: the dataset's files, or the path of its folder.

    Raises:
        DataError: this is not a LeRobot dataset of the supported version, or its episodes have gaps, overlap, are empty
            or differ in number from meta/info.json.
    """
    files = LocalFiles(files.absolute()) if isinstance(files, Path) else files
    info = read_info(files.path(INFO))
    episodes = EpisodeIndex(files, info)
    frames = episodes[-1].stop if episodes else 0
    if (len(episodes), frames) != (info.total_episodes, info.total_frames) or not episodes:
        raise DataError(
            f"{len(episodes)} episodes of {frames} frames are listed, "
            f"meta/info.json has {info.total_episodes} of {info.total_frames}",
            code="episode_count_mismatch",
            where=f"{files}/meta/episodes",
        )
    return Dataset(files, info, episodes, TaskList(files))


def media_type(data: bytes) -> str:
    """Return the media type of an image file, from its first bytes."""
    if data.startswith(b"\x89PNG"):
        return "image/png"
    if data.startswith(b"\xff\xd8"):
        return "image/jpeg"
    return "image/webp" if data[8:12] == b"WEBP" else "unknown"


def _rows(source: Path | IO[bytes], names: Sequence[str], first: int, count: int) -> tuple[int, pa.Table]:
    """Read the row groups of a data file that contain `count` rows from row `first` on.

    Returns:
        Number of rows before these row groups, and the table of their rows.
    """
    with pq.ParquetFile(source, pre_buffer=True) as file:
        sizes = [file.metadata.row_group(group).num_rows for group in range(file.metadata.num_row_groups)]
        ends = np.cumsum(sizes)
        groups = [g for g, end in enumerate(ends) if end > first and end - sizes[g] < first + count]
        skipped = int(ends[groups[0]] - sizes[groups[0]]) if groups else first
    return skipped, read_parquet(source, row_groups=groups, columns=list(names))
