"""Run by an interpreter that has lerobot: reads a dataset into arrays, writes one, or computes its statistics.

python lerobot_side.py read ROOT OUT.npz | write ROOT OUT.npz | statistics ROOT OUT.json
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch

try:
    import torchvision
except RuntimeError:  # a torchvision made for CUDA beside a torch for CPUs: it only lacks these two declarations
    library = torch.library.Library("torchvision", "DEF")
    library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
        del sys.modules[name]
    import torchvision

import av
import numpy as np
from lerobot.datasets.lerobot_dataset import LeRobotDataset

WINDOWS = {"action": [0.0, 0.1, 0.2], "observation.state": [-0.1, 0.0], "observation.images.wrist": [-0.1, 0.0]}
LENGTHS = (6, 9)


class VideoReader:
    """torchvision's reader of that name, which torchvision 0.24 dropped and lerobot 0.4 reads videos with."""

    def __init__(self, path: str, _stream: str) -> None:
        self.container = av.open(path)

    def seek(self, time: float, keyframes_only: bool) -> None:
        self.container.seek(int(time * av.time_base), any_frame=not keyframes_only)

    def __iter__(self):
        for frame in self.container.decode(video=0):
            array = frame.to_ndarray(format="rgb24")
            yield {"data": torch.from_numpy(array).permute(2, 0, 1), "pts": float(frame.time)}


if not hasattr(torchvision.io, "VideoReader"):
    torchvision.io.VideoReader = VideoReader
    torchvision.set_video_backend = lambda backend: None


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
    kept: dict[str, list[np.ndarray]] = {name: [] for name in features}
    for number, length in enumerate(LENGTHS):
        for step in range(length):
            frame = {
                "observation.state": rng.normal(size=3).astype(np.float32),
                "action": rng.normal(size=2).astype(np.float32),
                "observation.images.front": rng.integers(0, 256, (16, 16, 3), dtype=np.uint8),
                "observation.images.wrist": np.full((64, 64, 3), 20 + 15 * step + 5 * number, np.uint8),
            }
            for name, value in frame.items():
                kept[name].append(value)
            dataset.add_frame({**frame, "task": f"task {number}"})
        dataset.save_episode()
    dataset.finalize()
    np.savez(out, **{name: np.stack(values) for name, values in kept.items()})


def statistics(root: Path, out: Path) -> None:
    """By lerobot's own script, without its upload; seconds of CPU, and those of reading every item alone."""
    from lerobot.datasets.v30.augment_dataset_quantile_stats import compute_quantile_stats_for_dataset

    dataset = LeRobotDataset("test/small", root=root, video_backend="pyav")
    began, cpu = time.perf_counter(), time.process_time()
    found = compute_quantile_stats_for_dataset(dataset)
    seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - cpu
    cpu = time.process_time()
    for index in range(len(dataset)):
        dataset[index]
    reading = time.process_time() - cpu
    entries = {
        name: {stat: np.asarray(value).tolist() for stat, value in entry.items()} for name, entry in found.items()
    }
    times = {"seconds": seconds, "cpu_seconds": cpu_seconds, "reading_cpu_seconds": reading}
    out.write_text(json.dumps({**times, "stats": entries}))


if __name__ == "__main__":
    {"read": read, "write": write, "statistics": statistics}[sys.argv[1]](Path(sys.argv[2]), Path(sys.argv[3]))
