"""Statistics of a dataset as large as LIBERO: time against numpy, and what an outlier does to a histogram's.

Where `make interop` has made LeRobot's environment, also of a dataset with images against its script.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import time
from pathlib import Path

import numpy as np

from armature.components.contracts.machine import Machine
from armature.components.robots.datasets import quantiles
from armature.components.robots.datasets.lerobot.reader import Dataset
from armature.components.robots.datasets.measure import measure_dataset, overall, plan
from armature.components.robots.datasets.quantiles import LEVELS, Array
from armature.components.robots.datasets.settings import QuantileStatsSettings
from benchmarks.frames import SIDE, example_dataset
from benchmarks.table import Row, alternate, seconds

ROOT = Path(__file__).resolve().parents[1]
PYTHON, LEROBOT = ROOT / ".venv-lerobot/bin/python", ROOT / "tests/interop/lerobot/datasets_side.py"
FRAMES, EPISODES, WIDTH, BINS = 272_573, 1_693, 8, 5_000


def ours(rows: Array, lengths: list[int]) -> Array:
    """Compute the statistics of each episode and of all episodes with our code. Return the quantiles of all
    episodes."""
    _, values = quantiles.measure(rows, lengths, "state")
    return values.statistics(os.cpu_count() or 1).quantiles


def plain(rows: Array, lengths: list[int]) -> Array:
    """Compute the same statistics with numpy's functions, for each episode and for all episodes. Return the quantiles
    of all."""
    for part in (*np.split(rows, np.cumsum(lengths)[:-1]), rows):
        whole = part.astype(np.float64)
        _ = whole.min(0), whole.max(0), whole.mean(0), whole.std(0)
        result: Array = np.quantile(whole, LEVELS, axis=0)
    return result


def by_bins(column: Array) -> Array:
    """Estimate quantiles from a histogram over the column's range, as LeRobot does."""
    counts, edges = np.histogram(column, BINS, (column.min() - 1e-10, column.max() + 1e-10))
    cumulated = np.cumsum(counts)
    target = LEVELS * cumulated[-1]
    bins = np.searchsorted(cumulated, target)
    inside = (target - cumulated[bins] + counts[bins]) / counts[bins]
    result: Array = edges[bins] + inside * (edges[bins + 1] - edges[bins])
    return result


def example() -> tuple[Array, list[int]]:
    lengths = [FRAMES // EPISODES] * EPISODES
    lengths[-1] += FRAMES - sum(lengths)
    return np.random.default_rng(0).normal(size=(FRAMES, WIDTH)).astype(np.float32), lengths


def with_images(stored: str) -> Row:
    """Compare the CPU seconds that our code and LeRobot's own script take for all features of all frames, including
    images."""
    with tempfile.TemporaryDirectory() as folder:
        dataset = example_dataset(Path(folder) / "dataset", stored, episodes=4, length=100)
        ours = _cpu_seconds(dataset, ())
        numbers = _cpu_seconds(dataset, ("observation.state", "action"))
        out = Path(folder) / "theirs.json"
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": folder}
        order = json.dumps(["statistics", str(dataset.root), str(out)])
        subprocess.run([PYTHON, LEROBOT], env=environment, input=order, check=True, capture_output=True, text=True)
        theirs = json.loads(out.read_text())
    reading = theirs["reading_cpu_seconds"] / theirs["cpu_seconds"]
    note = (
        f"400 frames, two cameras of {SIDE}x{SIDE}; of ours {numbers / ours:.1%} is for state and action, the rest "
        f"decodes and counts images; of theirs {reading:.0%} reads items"
    )
    name = f"statistics with images, {stored}"
    return Row(name, ours, theirs["cpu_seconds"], "lerobot's script", "s of CPU", "lower", note)


def _cpu_seconds(dataset: Dataset, features: tuple[str, ...]) -> float:
    settings = QuantileStatsSettings(features=features, images="all")
    began = time.process_time()
    units = plan(dataset, settings, range(len(dataset.episodes)))
    measured = measure_dataset(dataset, units, Machine(), lambda done: None)
    overall(dataset, measured, os.cpu_count() or 1)
    return time.process_time() - began


def measure() -> list[Row]:
    images = [with_images("image"), with_images("video")] if PYTHON.exists() else []
    rows, lengths = example()
    assert np.array_equal(ours(rows, lengths), plain(rows, lengths)), "not the same quantiles"
    timed = alternate(7, lambda: seconds(lambda: ours(rows, lengths)), lambda: seconds(lambda: plain(rows, lengths)))
    column = rows[:, 0].copy()
    column[np.argmax(column)] = 1e4
    exact = np.quantile(column.astype(np.float64), LEVELS)
    result = quantiles.measure(column[:, None], [FRAMES], "state")[1].statistics().quantiles[:, 0]
    shape = f"{FRAMES:,} frames of {WIDTH}, {EPISODES:,} episodes; each episode's and all's, equal to the last bit"
    spoiled = "largest error of q01 to q99, in units of the data's std"
    return [
        *images,
        Row("statistics", timed.ours, timed.baseline, "numpy", "s", "lower", shape, timed.spread),
        Row(
            "error with one value of 1e4",
            float(np.abs(result - exact).max()),
            float(np.abs(by_bins(column) - exact).max()),
            f"{BINS:,} bins",
            "std",
            "lower",
            spoiled,
        ),
    ]
