"""Datasets go both ways between this package and LeRobot."""

from __future__ import annotations

import json

import numpy as np

from armature.components.artifacts.cache import DownloadCache
from armature.components.configuration.stages import run_stage
from armature.components.robots.datasets.lerobot.frames import FrameReader
from armature.components.robots.datasets.lerobot.reader import open_dataset
from armature.components.robots.datasets.settings import DatasetSettings, QuantileStatsSettings
from armature.components.robots.datasets.source import pinned
from tests.builders import make_machine
from tests.robots.datasets.conftest import LENGTHS


def channels_last(images: np.ndarray) -> np.ndarray:
    """Convert LeRobot's images, floats in [0, 1] of shape (..., 3, height, width), to uint8 (..., height, width, 3)."""
    return np.rint(np.moveaxis(images, -3, -1) * 255).astype(np.uint8)


def test_lerobot_reads_what_we_write(written, datasets_side, tmp_path):
    datasets_side("read", written[0], tmp_path / "read.npz")
    result = np.load(tmp_path / "read.npz")
    windows = {"action": [0.0, 0.1, 0.2], "observation.state": [-0.1, 0.0], "observation.images.wrist": [-0.1, 0.0]}
    frames = FrameReader(open_dataset(written[0]), DownloadCache.standard())
    items = [frames.item(index, windows) for index in range(sum(LENGTHS))]
    assert result["episodes"].tolist() == list(LENGTHS)
    assert result["task"].tolist() == [item["task"] for item in items]
    for name in set(items[0]) - {"task"}:
        ours = np.stack([item[name] for item in items])
        if ".images." in name and not name.endswith("_is_pad"):
            np.testing.assert_array_equal(channels_last(result[name]), ours)
        else:
            np.testing.assert_array_equal(result[name].reshape(ours.shape), ours)
    assert set(result.files) - set(items[0]) == {"episodes"}


def test_we_read_what_lerobot_writes(datasets_side, tmp_path):
    root = tmp_path / "theirs"
    datasets_side("write", root, tmp_path / "written.npz")
    saved = np.load(tmp_path / "written.npz")
    dataset = open_dataset(root)
    assert [episode.length for episode in dataset.episodes] == [6, 9]
    assert dict(dataset.tasks) == {0: "task 0", 1: "task 1"}
    frames = FrameReader(dataset, DownloadCache.standard())
    for index in range(15):
        item = frames.item(index, {})
        for name in ("observation.state", "action", "observation.images.front"):
            np.testing.assert_array_equal(item[name], saved[name][index])
        wrist = item["observation.images.wrist"].astype(int)
        assert np.abs(wrist - saved["observation.images.wrist"][index]).max() <= 6  # a step of time is 15
        assert item["task"] == f"task {int(index >= 6)}" and item["index"] == index


def test_statistics_agree_with_lerobot_where_it_is_exact(written, datasets_side, tmp_path):
    """Theirs average the episodes' quantiles, and are right for what does not depend on the episode."""
    facts = make_machine(store=tmp_path)
    source = run_stage("dataset", pinned(DatasetSettings(path=str(written[0]))), {}, facts)
    settings = QuantileStatsSettings(features=(), images="all")
    ours = json.loads(
        (run_stage("quantile-stats", settings, {"dataset": source}, facts).path / "stats.json").read_text()
    )
    datasets_side("statistics", written[0], tmp_path / "stats.json")
    stats = json.loads((tmp_path / "stats.json").read_text())["stats"]
    assert set(stats) == set(ours)
    for name, entry in stats.items():
        assert set(entry) == set(ours[name])
        for stat, value in entry.items():
            assert np.shape(value) == np.shape(ours[name][stat]), (name, stat)
            if stat in ("min", "max", "mean", "std", "count"):
                np.testing.assert_allclose(value, ours[name][stat], rtol=2e-4, atol=2e-4)
