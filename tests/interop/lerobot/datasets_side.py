"""Run by a Python that has lerobot: reads a dataset into arrays, writes one, or computes its statistics.

Lines on stdin say what to do: ["read", ROOT, "OUT.npz"], ["write", ROOT, "OUT.npz"], ["statistics", ROOT, "OUT.json"].
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import numpy as np
from lerobot.datasets.lerobot_dataset import LeRobotDataset
from lerobot.scripts.augment_dataset_quantile_stats import compute_quantile_stats_for_dataset

WINDOWS = {"action": [0.0, 0.1, 0.2], "observation.state": [-0.1, 0.0], "observation.images.wrist": [-0.1, 0.0]}
LENGTHS = (6, 9)


def read(root: Path, out: Path) -> None:
    dataset = LeRobotDataset("test/small", root=root, delta_timestamps=WINDOWS, video_backend="pyav")
    items = [dataset[index] for index in range(len(dataset))]
    arrays = {name: np.stack([np.asarray(item[name]) for item in items]) for name in items[0]}
    np.savez(out, **arrays, episodes=[episode["length"] for episode in dataset.meta.episodes])


def write(root: Path, out: Path) -> None:
    features = {
        "observation.state": {"dtype": "float32", "shape": (3,), "names": None},
        "action": {"dtype": "float32", "shape": (2,), "names": None},
        "observation.images.front": {"dtype": "image", "shape": (16, 16, 3), "names": ["height", "width", "channels"]},
        "observation.images.wrist": {"dtype": "video", "shape": (64, 64, 3), "names": ["height", "width", "channels"]},
    }
    dataset = LeRobotDataset.create("test/theirs", fps=10, features=features, root=root, robot_type="panda")
    rng = np.random.default_rng(0)
    saved: dict[str, list[np.ndarray]] = {name: [] for name in features}
    for number, length in enumerate(LENGTHS):
        for step in range(length):
            frame = {
                "observation.state": rng.normal(size=3).astype(np.float32),
                "action": rng.normal(size=2).astype(np.float32),
                "observation.images.front": rng.integers(0, 256, (16, 16, 3), dtype=np.uint8),
                "observation.images.wrist": np.full((64, 64, 3), 20 + 15 * step + 5 * number, np.uint8),
            }
            for name, value in frame.items():
                saved[name].append(value)
            dataset.add_frame({**frame, "task": f"task {number}"})
        dataset.save_episode()
    dataset.finalize()
    np.savez(out, **{name: np.stack(values) for name, values in saved.items()})


def statistics(root: Path, out: Path) -> None:
    """Write the statistics that LeRobot's own script computes for the dataset in `root` to the JSON file `out`.

    The file also has the seconds and CPU seconds of this, and the CPU seconds of only reading all items.
    """
    dataset = LeRobotDataset("test/small", root=root, video_backend="pyav")
    began, cpu = time.perf_counter(), time.process_time()
    result = compute_quantile_stats_for_dataset(dataset)
    seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - cpu
    cpu = time.process_time()
    for index in range(len(dataset)):
        dataset[index]
    reading = time.process_time() - cpu
    entries = {
        name: {stat: np.asarray(value).tolist() for stat, value in entry.items()} for name, entry in result.items()
    }
    times = {"seconds": seconds, "cpu_seconds": cpu_seconds, "reading_cpu_seconds": reading}
    out.write_text(json.dumps({**times, "stats": entries}))


if __name__ == "__main__":
    for line in sys.stdin:
        order, *paths = json.loads(line)
        {"read": read, "write": write, "statistics": statistics}[order](*map(Path, paths))
        print("done", flush=True)
