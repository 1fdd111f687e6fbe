"""Writer of a LeRobotDataset v3.0, episode by episode. The folder appears when the dataset is complete."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from armature.components.artifacts.disk import atomic_folder
from armature.components.contracts.errors import ConfigurationError, DataError
from armature.components.robots.datasets import histograms, quantiles
from armature.components.robots.datasets.histograms import Histogram
from armature.components.robots.datasets.lerobot.columns import arrow_type, described, sampled, to_arrow
from armature.components.robots.datasets.lerobot.layout import (
    DATA,
    EPISODES,
    IMAGE,
    INFO,
    OWN_FEATURES,
    STATS,
    TASKS,
    VERSION,
    VIDEO,
    VIDEOS,
    Feature,
    place,
)
from armature.components.robots.datasets.lerobot.video import VideoWriter, codec_name
from armature.components.robots.datasets.quantiles import Array, FeatureStatistics, document
from armature.components.robots.datasets.settings import LayoutSettings

MIB = 2**20


class FilePosition:
    """Chunk and number of the file that is being written."""

    def __init__(self, chunks_size: int) -> None:
        self._size, self._number = chunks_size, 0

    @property
    def chunk(self) -> int:
        """Number of the chunk (folder)."""
        return self._number // self._size

    @property
    def file(self) -> int:
        """Number of the file in its chunk."""
        return self._number % self._size

    def next(self) -> None:
        """Move on to the next file."""
        self._number += 1


class DatasetWriter:
    """Writer returned by `create_dataset`. A camera's dtype decides if it is stored as PNG or as video."""

    def __init__(
        self, root: Path, fps: float, robot_type: str | None, features: Mapping[str, Feature], layout: LayoutSettings
    ) -> None:
        for name, feature in features.items():
            if name in OWN_FEATURES or not (feature.is_number or feature.is_visual or feature.dtype == "string"):
                raise ConfigurationError(
                    f"feature {name!r} of type {feature.dtype!r} cannot be written", code="feature_not_writable"
                )
            if feature.is_visual and (len(feature.shape) != 3 or feature.shape[2] != 3):
                raise ConfigurationError(
                    f"{name!r} has the shape {feature.shape}, not (height, width, 3)", code="invalid_image_shape"
                )
            if feature.dtype == VIDEO and layout.video is None:
                raise ConfigurationError(
                    f"feature {name!r} is a video, but layout.video is not set", code="video_layout_missing"
                )
        self.features = {**features, **OWN_FEATURES}
        self._root, self._fps, self._robot_type, self._layout = root, fps, robot_type, layout
        stored = {name: each for name, each in self.features.items() if each.dtype != VIDEO}
        schema = pa.schema([(name, arrow_type(each)) for name, each in stored.items()])
        self._schema = schema.with_metadata({b"huggingface": described(stored)})
        self._tasks: dict[str, int] = {}
        self._episodes: list[dict[str, Any]] = []
        self._frames = 0
        self._data = FilePosition(layout.chunks_size)
        self._parquet: pq.ParquetWriter | None = None
        self._videos: dict[str, VideoWriter] = {}
        self._video_places = {
            k: FilePosition(layout.chunks_size) for k, each in features.items() if each.dtype == VIDEO
        }
        self._numbers: dict[str, list[quantiles.FeatureValues]] = {}
        self._images: dict[str, list[Histogram]] = {}

    def add_episode(self, frames: Mapping[str, Any], task: str) -> None:
        """Append an episode.

        Args:
            frames: arrays (frames, *shape) by feature; images are uint8 (height, width, 3).
            task: text of the task.

        Raises:
            DataError: a feature is missing, has another shape or another number of frames, or is not finite.
        """
        index = len(self._episodes)
        arrays = self._checked(frames, index)
        length = len(next(iter(arrays.values())))
        number = self._tasks.setdefault(task, len(self._tasks))
        arrays |= self._index_columns(index, length, number)
        statistics = self._measure(arrays, index, length)
        self._append(arrays)
        row: dict[str, Any] = {
            "episode_index": index,
            "tasks": [task],
            "length": length,
            "data/chunk_index": self._data.chunk,
            "data/file_index": self._data.file,
            "dataset_from_index": self._frames,
            "dataset_to_index": self._frames + length,
        }
        for key in self._video_places:
            row |= {f"videos/{key}/{name}": value for name, value in self._film(key, arrays[key]).items()}
        row |= {"meta/episodes/chunk_index": 0, "meta/episodes/file_index": 0}
        for name, each in statistics.items():
            row |= {f"stats/{name}/{stat}": value for stat, value in each.document().items()}
        self._episodes.append(row)
        self._frames += length

    def finish(self) -> None:
        """Write the index, tasks, statistics and meta/info.json.

        Raises:
            DataError: no episode was added.
        """
        if not self._episodes:
            raise DataError("a dataset needs at least one episode", code="no_episodes", where=str(self._root))
        self.close()
        whole: dict[str, FeatureStatistics] = {}
        for name, feature in self.features.items():
            if feature.is_number:
                whole[name] = quantiles.merge(self._numbers[name]).statistics().reshape(feature.shape)
            elif feature.is_visual:
                whole[name] = histograms.merge(self._images[name]).statistics()
        path = self._root / place(EPISODES, chunk_index=0, file_index=0)
        path.parent.mkdir(parents=True)
        pq.write_table(pa.Table.from_pylist(self._episodes), path, compression="snappy")
        index = pd.Index(list(self._tasks), name="task")
        pd.DataFrame({"task_index": list(self._tasks.values())}, index=index).to_parquet(self._root / TASKS)
        (self._root / STATS).write_text(json.dumps(document(whole), indent=4) + "\n")
        (self._root / INFO).write_text(json.dumps(self._info(), indent=4) + "\n")

    def close(self) -> None:
        """Close all open files."""
        if self._parquet is not None:
            self._parquet.close()
            self._parquet = None
        for writer in self._videos.values():
            writer.close()
        self._videos.clear()

    def _info(self) -> dict[str, Any]:
        features = {name: each.model_dump(mode="json") for name, each in self.features.items()}
        for key in self._video_places:
            features[key]["info"] = self._video_info(key)
        whole = self._fps == int(self._fps)
        return {
            "codebase_version": VERSION,
            "robot_type": self._robot_type,
            "total_episodes": len(self._episodes),
            "total_frames": self._frames,
            "total_tasks": len(self._tasks),
            "chunks_size": self._layout.chunks_size,
            "data_files_size_in_mb": self._layout.data_files_size_in_mb,
            "video_files_size_in_mb": self._layout.video_files_size_in_mb,
            "fps": int(self._fps) if whole else self._fps,
            "splits": {"train": f"0:{len(self._episodes)}"},
            "data_path": DATA,
            "video_path": VIDEOS if self._video_places else None,
            "features": features,
        }

    def _video_info(self, key: str) -> dict[str, Any]:
        assert self._layout.video is not None, "__init__ has checked this"
        height, width, channels = self.features[key].shape
        return {
            "video.height": height,
            "video.width": width,
            "video.channels": channels,
            "video.codec": codec_name(self._layout.video.codec),
            "video.pix_fmt": self._layout.video.pixel_format,
            "video.fps": self._fps,
            "video.is_depth_map": False,
            "has_audio": False,
        }

    def _checked(self, frames: Mapping[str, Any], index: int) -> dict[str, Array]:
        expected = set(self.features) - set(OWN_FEATURES)
        if set(frames) != expected:
            raise DataError(
                f"the episode has the features {sorted(frames)}, not {sorted(expected)}",
                code="features_mismatch",
                where=f"episode {index}",
            )
        arrays, lengths = {}, set()
        for name, values in frames.items():
            feature = self.features[name]
            dtype = {"string": object}.get(feature.dtype, np.uint8 if feature.is_visual else feature.dtype)
            array = np.asarray(values)
            if feature.is_visual and array.dtype != np.uint8:
                raise DataError(
                    f"images {name!r} are {array.dtype}, not uint8", code="image_not_uint8", where=f"episode {index}"
                )
            shape = array.shape[1:] or (1,)
            if shape != feature.shape or not len(array):
                where = f"episode {index}"
                raise DataError(
                    f"{name!r} has the shape {array.shape}, not (frames, *{feature.shape})",
                    code="frame_shape_mismatch",
                    where=where,
                )
            arrays[name] = array.astype(dtype, copy=False)
            lengths.add(len(array))
        if len(lengths) != 1:
            raise DataError(
                f"the features have {sorted(lengths)} frames", code="frame_counts_differ", where=f"episode {index}"
            )
        return arrays

    def _index_columns(self, index: int, length: int, task: int) -> dict[str, Array]:
        """Return the columns that identify each frame."""
        frame = np.arange(length)
        return {
            "timestamp": (frame / self._fps).astype(np.float32),
            "frame_index": frame,
            "episode_index": np.full(length, index),
            "index": self._frames + frame,
            "task_index": np.full(length, task),
        }

    def _measure(self, arrays: Mapping[str, Array], index: int, length: int) -> dict[str, FeatureStatistics]:
        """Return the statistics of the episode. Also keep its values for the statistics of the whole dataset."""
        statistics = {}
        for name, feature in self.features.items():
            if feature.is_number:
                (each,), values = quantiles.measure(arrays[name].reshape(length, -1), [length], name, index)
                statistics[name] = each.reshape(feature.shape)
                self._numbers.setdefault(name, []).append(values)
            elif feature.is_visual:
                histogram = Histogram.empty()
                for frame in sampled(length):
                    histogram = histogram.add(Image.fromarray(arrays[name][frame]))
                statistics[name] = histogram.statistics()
                self._images.setdefault(name, []).append(histogram)
        return statistics

    def _append(self, arrays: Mapping[str, Array]) -> None:
        """Write an episode as one row group of the current data file. If the file is full, start the next one."""
        columns = []
        for name in self._schema.names:
            feature = self.features[name]
            if feature.dtype == IMAGE:
                rows = [{"bytes": _png(each), "path": f"frame-{i:06d}.png"} for i, each in enumerate(arrays[name])]
                columns.append(pa.array(rows, arrow_type(feature)))
            else:
                columns.append(to_arrow(arrays[name], feature))
        if self._parquet is not None and self._data_file().stat().st_size >= self._layout.data_files_size_in_mb * MIB:
            self._parquet.close()
            self._parquet = None
            self._data.next()
        if self._parquet is None:
            self._data_file().parent.mkdir(parents=True, exist_ok=True)
            self._parquet = pq.ParquetWriter(self._data_file(), self._schema, compression="snappy")
        self._parquet.write_table(pa.Table.from_arrays(columns, schema=self._schema))

    def _data_file(self) -> Path:
        return self._root / place(DATA, chunk_index=self._data.chunk, file_index=self._data.file)

    def _film(self, key: str, frames: Array) -> dict[str, Any]:
        """Append an episode's frames to the camera's video file.

        Returns:
            Location of the episode in the video, by column of meta/episodes.
        """
        assert self._layout.video is not None, "__init__ has checked this"
        at = self._video_places[key]
        writer = self._videos.get(key)
        if writer is not None and writer.bytes >= self._layout.video_files_size_in_mb * MIB:
            writer.close()
            at.next()
            writer = None
        if writer is None:
            path = self._root / place(VIDEOS, video_key=key, chunk_index=at.chunk, file_index=at.file)
            height, width, _ = self.features[key].shape
            writer = self._videos[key] = VideoWriter(path, self._fps, width, height, self._layout.video)
        start = writer.seconds
        writer.append(frames)
        where = {"chunk_index": at.chunk, "file_index": at.file}
        return {**where, "from_timestamp": start, "to_timestamp": writer.seconds}


@contextmanager
def create_dataset(
    root: Path,
    *,
    fps: float,
    robot_type: str | None,
    features: Mapping[str, Feature | Mapping[str, Any]],
    layout: LayoutSettings = LayoutSettings(),  # noqa: B008 - it is frozen
) -> Iterator[DatasetWriter]:
    """Write a new LeRobot dataset (v3.0) within a `with` block. It appears at `root` when the block ends without error.

    Args:
        root: folder of the dataset; it must not exist yet.
        fps: frames per second.
        robot_type: name of the robot, or None.
        features: columns and cameras by name, as LeRobot's info.json describes them: dtype, shape and names.
        layout: sizes of files and video settings.

    Raises:
        DataError: `root` exists, no episode was added, or the disk is full.

    Example::

        features = {"action": {"dtype": "float32", "shape": [2], "names": ["dx", "dy"]}}
        with create_dataset(Path("my-dataset"), fps=10.0, robot_type="arm", features=features) as writer:
            writer.add_episode({"action": actions}, "move the arm to the block")
    """
    root = root.absolute()  # Arrow and FFmpeg read a relative path that starts with "name:" as a URL
    if root.exists():
        raise DataError(
            "the folder already exists", code="dataset_exists", where=str(root), remedy="choose another, or remove it"
        )
    root.parent.mkdir(parents=True, exist_ok=True)
    with atomic_folder(root) as folder:
        columns = {name: Feature.model_validate(feature) for name, feature in features.items()}
        writer = DatasetWriter(folder, fps, robot_type, columns, layout)
        try:
            yield writer
            writer.finish()
        finally:
            writer.close()


def _png(array: Array) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(array).save(buffer, "PNG")
    return buffer.getvalue()
