"""A robot dataset of a million episodes and 20,000 video files: what a node needs to use it.

The tables are whole; the videos are one file under many names.
"""

from __future__ import annotations

import json
import os
import pickle
import tempfile
import tracemalloc
from dataclasses import astuple
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from armature.components.contracts.machine import Machine, MachineWorkers
from armature.components.machine.workers.channel import encoded
from armature.components.robots.datasets.lerobot.columns import arrow_type, to_arrow
from armature.components.robots.datasets.lerobot.layout import (
    DATA,
    EPISODES,
    INFO,
    OWN_FEATURES,
    TASKS,
    VERSION,
    VIDEOS,
    Feature,
    place,
)
from armature.components.robots.datasets.lerobot.reader import Dataset, open_dataset
from armature.components.robots.datasets.lerobot.video import VideoSettings, VideoWriter
from armature.components.robots.datasets.measure import Measured, as_data, measure_dataset, measure_unit, overall, plan
from armature.components.robots.datasets.mixture import Mixture
from armature.components.robots.datasets.quantiles import document
from armature.components.robots.datasets.settings import ALONE, QuantileStatsSettings
from armature.components.robots.datasets.source import DatasetSource
from benchmarks.table import Row, seconds

CAMERAS = ("observation.images.front", "observation.images.wrist")
SIDE, FPS, LENGTH, TASK_COUNT = 64, 10, 8, 1000
OF_DATA_FILE, OF_META_FILE = 1000, 250_000
"""Number of episodes in a data file, and in a file of meta/episodes."""
WIDTHS = {"observation.state": 8, "action": 7}
SIZE, VIDEO_FILES, WORKERS = 1_000_000, 20_000, 4


def write_dataset(root: Path, episodes: int, video_files: int) -> None:
    """Write a dataset with `episodes` episodes of `LENGTH` frames. Both cameras together have `video_files` video
    files."""
    of_video_file = episodes * len(CAMERAS) // video_files
    features = {name: Feature(dtype="float32", shape=(width,)) for name, width in WIDTHS.items()} | OWN_FEATURES
    _write_data(root, episodes, features)
    _write_episodes(root, episodes, of_video_file)
    for camera in CAMERAS:
        features[camera] = Feature(dtype="video", shape=(SIDE, SIDE, 3), names=["height", "width", "channels"])
    _write_videos(root, video_files // len(CAMERAS), of_video_file)
    tasks = [f"put object {number} into the drawer" for number in range(TASK_COUNT)]
    pq.write_table(pa.table({"task": tasks, "task_index": range(TASK_COUNT)}), root / TASKS)
    info = {
        "codebase_version": VERSION,
        "robot_type": "panda",
        "total_episodes": episodes,
        "total_frames": episodes * LENGTH,
        "total_tasks": TASK_COUNT,
        "chunks_size": 1000,
        "fps": FPS,
        "data_path": DATA,
        "video_path": VIDEOS,
        "features": {name: each.model_dump(mode="json") for name, each in features.items()},
    }
    (root / INFO).write_text(json.dumps(info))


def _write_data(root: Path, episodes: int, features: dict[str, Feature]) -> None:
    schema = pa.schema([(name, arrow_type(each)) for name, each in features.items()])
    rng = np.random.default_rng(0)
    for first in range(0, episodes, OF_DATA_FILE):
        count = min(OF_DATA_FILE, episodes - first)
        frames = count * LENGTH
        numbers = np.repeat(np.arange(first, first + count), LENGTH)
        frame = np.tile(np.arange(LENGTH), count)
        values = {name: rng.normal(size=(frames, width)).astype(np.float32) for name, width in WIDTHS.items()}
        values |= {
            "timestamp": (frame / FPS).astype(np.float32),
            "frame_index": frame,
            "episode_index": numbers,
            "index": first * LENGTH + np.arange(frames),
            "task_index": numbers % TASK_COUNT,
        }
        path = root / place(DATA, **_file(first // OF_DATA_FILE))
        path.parent.mkdir(parents=True, exist_ok=True)
        columns = [to_arrow(values[name], features[name]) for name in schema.names]
        pq.write_table(pa.Table.from_arrays(columns, schema=schema), path)


def _write_episodes(root: Path, episodes: int, of_video_file: int) -> None:
    for number, first in enumerate(range(0, episodes, OF_META_FILE)):
        index = np.arange(first, min(first + OF_META_FILE, episodes))
        file = index // OF_DATA_FILE
        columns = {
            "episode_index": index,
            "tasks": pa.array([[f"put object {each % TASK_COUNT} into the drawer"] for each in index]),
            "length": np.full(len(index), LENGTH),
            "data/chunk_index": file // 1000,
            "data/file_index": file % 1000,
            "dataset_from_index": index * LENGTH,
            "dataset_to_index": index * LENGTH + LENGTH,
        }
        for camera in CAMERAS:
            file, within = np.divmod(index, of_video_file)
            columns[f"videos/{camera}/chunk_index"] = file // 1000
            columns[f"videos/{camera}/file_index"] = file % 1000
            columns[f"videos/{camera}/from_timestamp"] = within * LENGTH / FPS
            columns[f"videos/{camera}/to_timestamp"] = (within + 1) * LENGTH / FPS
        path = root / place(EPISODES, **_file(number))
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.table(columns), path)


def _write_videos(root: Path, files: int, episodes: int) -> None:
    """Write one video with the frames of `episodes` episodes, and hard links to it as the video files of both
    cameras."""
    settings = VideoSettings(codec="libx264", pixel_format="yuv420p", quality=30, keyframe_every=LENGTH)
    film = root / "film.mp4"
    writer = VideoWriter(film, FPS, SIDE, SIDE, settings)
    ground = np.random.default_rng(0).integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8)
    for _ in range(episodes):
        writer.append([ground] * LENGTH)
    writer.close()
    for camera in CAMERAS:
        for number in range(files):
            path = root / place(VIDEOS, video_key=camera, **_file(number))
            path.parent.mkdir(parents=True, exist_ok=True)
            os.link(film, path)
    film.unlink()


def _file(number: int) -> dict[str, int]:
    return {"chunk_index": number // 1000, "file_index": number % 1000}


def first_sample(root: Path) -> None:
    dataset = open_dataset(root)
    cameras = {name: name for name in CAMERAS}
    source = DatasetSource(
        dataset, ALONE, 1.0, None, "observation.state", "action", cameras, range(len(dataset.episodes))
    )
    _ = Mixture([source], 5, 0)[0]


def listed(dataset: Dataset) -> list[dict[str, Any]]:
    """Read the dataset's episode index as a list with one dict per episode."""
    paths = (dataset.root / name for name in dataset.files.names("meta/episodes"))
    return [row for path in paths for row in pq.read_table(path, partitioning=None).to_pylist()]


def measured_by(dataset: Dataset, workers: int) -> tuple[float, Measured]:
    units = plan(dataset, QuantileStatsSettings(features=tuple(WIDTHS)), range(len(dataset.episodes)))
    result: list[Measured] = []
    machine = Machine(workers=MachineWorkers(statistics=workers))
    return seconds(lambda: result.append(measure_dataset(dataset, units, machine, lambda done: None))), result[0]


def measure() -> list[Row]:
    with tempfile.TemporaryDirectory() as folder:
        os.environ["ARMATURE_CACHE"] = f"{folder}/cache"
        root = Path(folder) / "dataset"
        write_dataset(root, SIZE, VIDEO_FILES)
        first, further = seconds(lambda: first_sample(root)), seconds(lambda: first_sample(root))
        dataset = open_dataset(root)
        rows: list[dict[str, Any]] = []
        reading = seconds(lambda: rows.extend(listed(dataset)))
        pickled = len(pickle.dumps(rows))
        rows.clear()
        # Counted apart from the time, since it is slower. The process may grow by less, if it has memory to spare.
        tracemalloc.start()
        rows.extend(listed(dataset))
        objects, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        rows.clear()
        quick, exact = seconds(dataset.files.quick_digest), seconds(dataset.files.digest)
        alone, one = measured_by(dataset, 1)
        shared, four = measured_by(dataset, WORKERS)
        assert one.episodes.equals(four.episodes) and document(overall(dataset, one, 1)) == document(
            overall(dataset, four, 1)
        )
        units = plan(dataset, QuantileStatsSettings(features=tuple(WIDTHS)), range(SIZE))
        sent = max(len(encoded(["measure", astuple(unit)])) for unit in units)
        answer = len(encoded(as_data(measure_unit(units[0], dataset))))
    mib = dataset.episodes.numbers.nbytes / 2**20
    what = f"{SIZE:,} episodes, {VIDEO_FILES:,} video files, {len(CAMERAS)} cameras"
    each = f"{len(units):,} tasks of {OF_DATA_FILE:,} episodes; {answer / 2**20:.3g} MiB come back from each"
    return [
        Row(
            "index",
            mib,
            objects / 2**20,
            "an object per episode",
            "MiB",
            "lower",
            f"{what}; all processes map one file",
        ),
        Row("first sample, on a new node", first, reading, "the list alone, as objects", "s", "lower"),
        Row("first sample, in every further process", further, reading, "the list alone, as objects", "s", "lower"),
        Row("digest", quick, exact, "of the content", "s", "lower", 'digest = "quick", of which a video costs a stat'),
        Row("sent for a task of statistics", sent, pickled, "the list, pickled", "bytes", "lower", each),
        Row(f"statistics by {WORKERS} workers", shared, alone, "one worker", "s", "lower", "the same bits"),
    ]
