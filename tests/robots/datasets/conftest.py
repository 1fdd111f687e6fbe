"""A small LeRobot dataset whose values are all known, and functions to edit a copy of it."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from armature.components.robots.datasets.lerobot.layout import Feature
from armature.components.robots.datasets.lerobot.video import VideoSettings
from armature.components.robots.datasets.lerobot.writer import LayoutSettings, create_dataset

LENGTHS = (7, 1, 12)
SIDE = 32


def layout(**changes: Any) -> LayoutSettings:
    video = VideoSettings(codec="libx264", quality=10, keyframe_every=2)
    return LayoutSettings.model_validate({"video": video} | changes)


def frames_of(length: int, seed: int) -> dict[str, Any]:
    """Return an episode's frames. Images are smooth and brighten with time, so that a codec preserves them."""
    rng = np.random.default_rng(seed)
    bright = 20 + 15 * np.arange(length)[:, None, None, None] + 5 * seed
    tint = np.array([0, 20, 40])
    images = np.broadcast_to(bright + tint, (length, SIDE, SIDE, 3)).astype(np.uint8)
    return {
        "observation.state": rng.normal(size=(length, 8)).astype(np.float32),
        "action": rng.normal(size=(length, 7)).astype(np.float32),
        "next.reward": rng.normal(size=length).astype(np.float32),
        "observation.images.front": rng.integers(0, 256, (length, SIDE, SIDE, 3), dtype=np.uint8),
        "observation.images.wrist": images,
    }


FEATURES = {
    "observation.state": Feature(dtype="float32", shape=(8,), names=[f"s{i}" for i in range(8)]),
    "action": Feature(dtype="float32", shape=(7,)),
    "next.reward": Feature(dtype="float32", shape=(1,)),
    "observation.images.front": Feature(dtype="image", shape=(SIDE, SIDE, 3), names=["height", "width", "channels"]),
    "observation.images.wrist": Feature(dtype="video", shape=(SIDE, SIDE, 3), names=["height", "width", "channels"]),
}


def write(root: Path, **changes: Any) -> list[dict[str, Any]]:
    """Write the dataset to `root` and return the episodes that were written."""
    episodes = [frames_of(length, seed) for seed, length in enumerate(LENGTHS)]
    with create_dataset(root, fps=10, robot_type="panda", features=FEATURES, layout=layout(**changes)) as writer:
        for number, episode in enumerate(episodes):
            writer.add_episode(episode, f"task {number % 2}")
    return episodes


@pytest.fixture(scope="session", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Use a temporary folder as the download cache."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ARMATURE_CACHE", str(folder))
        yield folder


@pytest.fixture(scope="session")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    root = tmp_path_factory.mktemp("datasets") / "small"
    return root, write(root)


@pytest.fixture
def copied(written: tuple[Path, Any], tmp_path: Path) -> Path:
    """Return a copy of the dataset that a test may damage."""
    return shutil.copytree(written[0], tmp_path / "copy")


def edit_table(path: Path, change: Callable[[pd.DataFrame], Any]) -> None:
    """Rewrite a table after `change` has edited its rows."""
    table = pd.read_parquet(path)
    change(table)
    table.to_parquet(path)


def edit_cell(path: Path, row: int, column: str, value: Any) -> None:
    table = pd.read_parquet(path)
    table.at[row, column] = value
    table.to_parquet(path)
