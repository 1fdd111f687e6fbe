"""Videos of two evaluations side by side: the same beginning, played by two policies."""

from __future__ import annotations

from itertools import zip_longest
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from armature.components.datasets.lerobot.video import VideoWriter, pyav
from armature.components.evaluation.libero.eval_info import video_path
from armature.components.evaluation.libero.results import read_results
from armature.components.evaluation.libero.videos import ENCODING

GAP = 8
"""Black pixels between the two."""


def write_pairs(first: Path, second: Path, out: Path) -> dict[str, str]:
    """A video for each episode that both evaluations filmed, in `out`/videos; what it shows to its path in `out`.

    The first episodes of each task are among them: they are the first successes or failures of both.
    """
    found = {}
    for one, other in zip(read_results(first), read_results(second), strict=True):
        path = video_path(one.key)
        if (first / path).is_file() and (second / path).is_file():
            join_videos(first / path, second / path, out / path)
            ends = ", then ".join("solved" if each.success else "not solved" for each in (one, other))
            found[f"video: {one.suite} {one.task}, episode {one.episode}, {ends}"] = path
    return found


def join_videos(first: Path, second: Path, out: Path) -> None:
    """Both from their beginnings, at the first one's speed; the shorter one stands still at its end."""
    (left, fps), (right, _) = _read(first), _read(second)
    height, width, _ = left[0].shape
    writer = VideoWriter(out, fps, 2 * width + GAP, height, ENCODING)
    gap, ends = np.zeros((height, GAP, 3), np.uint8), (left[-1], right[-1])
    pairs = ((a if a is not None else ends[0], b if b is not None else ends[1]) for a, b in zip_longest(left, right))
    writer.append(np.concatenate([a, gap, b], axis=1) for a, b in pairs)
    writer.close()


def _read(path: Path) -> tuple[list[NDArray[np.uint8]], int]:
    with pyav().open(str(path.absolute())) as video:
        frames = [frame.to_ndarray(format="rgb24") for frame in video.decode(video=0)]
        return frames, round(video.streams.video[0].average_rate)
