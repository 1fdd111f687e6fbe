"""Samples of a robot dataset read at random, as a policy's loader does: against opening each one's files."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import numpy as np

from armature.components.robots.datasets.lerobot.layout import Feature
from armature.components.robots.datasets.lerobot.reader import Dataset, open_dataset
from armature.components.robots.datasets.lerobot.video import VideoSettings
from armature.components.robots.datasets.lerobot.writer import LayoutSettings, create_dataset
from armature.components.robots.datasets.mixture import Mixture
from armature.components.robots.datasets.settings import DatasetSettings
from armature.components.robots.datasets.source import DatasetSource
from benchmarks.table import Row, alternate, seconds

CAMERAS = ("observation.images.image", "observation.images.image2")
KINDS = {"image": "PNG in Parquet", "video": "H.264, a key frame in 2"}
SIDE, CHUNK, SAMPLES = 128, 10, 200


def example_dataset(root: Path, stored: str, episodes: int, length: int) -> Dataset:
    """Write a dataset in which two cameras see a red box that moves over a still, slightly noisy background."""
    video = VideoSettings(codec="libx264", pixel_format="yuv420p", quality=23, keyframe_every=2)
    layout = LayoutSettings(chunks_size=1000, data_files_size_in_mb=100, video_files_size_in_mb=200, video=video)
    features = {name: Feature(dtype=stored, shape=(SIDE, SIDE, 3)) for name in CAMERAS}
    features |= {"observation.state": Feature(dtype="float32", shape=(8,))}
    features |= {"action": Feature(dtype="float32", shape=(7,))}
    rng = np.random.default_rng(0)
    rows, columns = np.mgrid[:SIDE, :SIDE]
    with create_dataset(root, fps=20, robot_type="panda", features=features, layout=layout) as writer:
        for episode in range(episodes):
            ground = 120 + 40 * np.sin(columns / 17 + episode) + 40 * np.cos(rows / 23) + rng.normal(0, 3, (SIDE, SIDE))
            images = np.repeat((ground[..., None] + [0, 10, 30]).clip(0, 255).astype(np.uint8)[None], length, 0)
            for frame in range(length):
                left = frame * (SIDE - 16) // length
                images[frame, 20:40, left : left + 16] = [200, 30, 30]
            numbers = {"observation.state": rng.normal(size=(length, 8)), "action": rng.normal(size=(length, 7))}
            writer.add_episode({CAMERAS[0]: images, CAMERAS[1]: images[:, ::-1], **numbers}, f"task {episode % 3}")
    return open_dataset(root)


def reopened(dataset: Dataset, mixture: Mixture) -> None:
    """Read the columns and images of a tenth of the same samples. The files are opened again for each sample."""
    for position in range(SAMPLES // 10):
        sample = mixture.place(position)
        episode = dataset.episode_at(sample.frame)
        dataset.columns(["observation.state", "action", "task_index"], episode)
        for camera in CAMERAS:
            next(iter(dataset.images(camera, episode, [sample.frame - episode.start])))


def measure() -> list[Row]:
    result = []
    with tempfile.TemporaryDirectory() as folder:
        os.environ["ARMATURE_CACHE"] = folder
        for stored in KINDS:
            dataset = example_dataset(Path(folder) / stored, stored, episodes=10, length=150)
            (settings,) = DatasetSettings(path=str(dataset.root)).listed()
            cameras = {name: name for name in CAMERAS}
            episodes = tuple(range(len(dataset.episodes)))
            source = DatasetSource(dataset, settings.tag, 1.0, None, "observation.state", "action", cameras, episodes)
            mixture = Mixture([source], CHUNK, 0)
            _ = mixture[0]  # the columns are written out when the first is asked for
            timed = alternate(
                3,
                lambda mixture=mixture: SAMPLES / seconds(lambda: [mixture[i] for i in range(SAMPLES)]),
                lambda dataset=dataset, mixture=mixture: SAMPLES / 10 / seconds(lambda: reopened(dataset, mixture)),
            )
            note = f"two cameras of {SIDE}x{SIDE}, {KINDS[stored]}; {CHUNK} actions; one process"
            result.append(
                Row(
                    f"samples at random, {stored}",
                    timed.ours,
                    timed.baseline,
                    "files opened again",
                    "samples/s",
                    "higher",
                    note,
                    timed.spread,
                )
            )
    return result
