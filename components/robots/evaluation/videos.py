"""Videos of successful and failed episodes, filmed while the recorded actions are executed again.

Which episodes get a video is only known when all have been played, and rendering every step of every episode would
cost many times the physics. The simulator is deterministic, so the repetition shows the same episode.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import zip_longest
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from armature.components.artifacts.videos import pyav
from armature.components.machine.workers.channel import WorkerError
from armature.components.robots.datasets.lerobot.video import VideoSettings, VideoWriter
from armature.components.robots.evaluation.episode import (
    Actions,
    CameraImages,
    EpisodeOutcome,
    PlayedEpisode,
    SimulatorClient,
    replay_episode,
)
from armature.components.robots.evaluation.results import read_results, video_path
from armature.components.robots.evaluation.schedule import EpisodeKey, PlannedEpisode

ENCODING = VideoSettings(codec="libx264", pixel_format="yuv420p", quality=23, keyframe_every=20)


def chosen(
    planned: Sequence[PlannedEpisode], outcomes: Mapping[EpisodeKey, EpisodeOutcome], each: int
) -> list[PlannedEpisode]:
    """Return the episodes to film: the first `each` successes and failures of every task and of every perturbation.

    Perturbed episodes are counted per perturbation, over all tasks. Episodes that could not be played are left out.
    """
    taken: dict[tuple[object, bool], int] = {}
    picked = []
    for episode in planned:
        outcome = outcomes[episode.key]
        kind = (episode.perturbation or episode.key[:2], outcome.success)
        if outcome.failure is None and taken.get(kind, 0) < each:
            taken[kind] = taken.get(kind, 0) + 1
            picked.append(episode)
    return picked


def film(
    picked: Sequence[PlannedEpisode],
    outcomes: Mapping[EpisodeKey, EpisodeOutcome],
    process: SimulatorClient,
    attempts: int,
) -> Iterator[tuple[PlannedEpisode, PlayedEpisode]]:
    """Repeat each picked episode with camera images. Yield the episode and its repetition.

    Raises:
        WorkerError: the simulator died in every attempt.
    """
    for episode in picked:
        yield episode, _again(process, episode, outcomes[episode.key].actions, attempts)


def _again(process: SimulatorClient, episode: PlannedEpisode, actions: Actions, attempts: int) -> PlayedEpisode:
    for _ in range(attempts - 1):
        with suppress(WorkerError):
            return replay_episode(process, 0, episode, actions)
    return replay_episode(process, 0, episode, actions)


def differs(played: PlayedEpisode, recorded: EpisodeOutcome) -> str | None:
    """Return a text that says how the end of the repetition differs from the recorded end, or None if they are
    equal."""
    if (played.success, played.steps) == (recorded.success, recorded.steps):
        return None
    return (
        f"played again, it ended with success {played.success} after {played.steps} steps; "
        f"before, with success {recorded.success} after {recorded.steps}"
    )


def write_video(folder: Path, episode: PlannedEpisode, images: Sequence[CameraImages], fps: int) -> str:
    """Write a video of an episode with all cameras side by side; return its path relative to `folder`."""
    frames = [side_by_side(each) for each in images]
    height, width, _ = frames[0].shape
    relative = video_path(episode.key)
    writer = VideoWriter(folder / relative, fps, width, height, ENCODING)
    writer.append(frames)
    writer.close()
    return relative


def side_by_side(images: CameraImages) -> NDArray[np.uint8]:
    """Return the images of all cameras next to each other, cropped to even sides as the pixel format requires."""
    joined = np.concatenate(list(images.values()), axis=1)
    return joined[: joined.shape[0] // 2 * 2, : joined.shape[1] // 2 * 2]


# --- Videos of two evaluations side by side: the same initial state, played by two policies ---

GAP = 8
"""Width in pixels of the black gap between the two videos."""


def write_pairs(first: Path, second: Path, out: Path) -> dict[str, str]:
    """Write a side-by-side video for each episode that both evaluations filmed.

    Each evaluation films its first successes and failures, so these are usually the first episodes of each task.

    Returns:
        Paths of the videos relative to `out`, by description.
    """
    videos = {}
    for one, other in zip(read_results(first), read_results(second), strict=True):
        path = video_path(one.key)
        if (first / path).is_file() and (second / path).is_file():
            join_videos(first / path, second / path, out / path)
            ends = ", then ".join("solved" if each.success else "not solved" for each in (one, other))
            videos[f"video: {one.suite} {one.task}, episode {one.episode}, {ends}"] = path
    return videos


def join_videos(first: Path, second: Path, out: Path) -> None:
    """Write one video that shows both videos side by side, at the frame rate of the first. The shorter one freezes at
    its last frame."""
    (left, fps), (right, _) = _read(first), _read(second)
    height, width, _ = left[0].shape
    writer = VideoWriter(out, fps, 2 * width + GAP, height, ENCODING)
    gap, ends = np.zeros((height, GAP, 3), np.uint8), (left[-1], right[-1])
    pairs = ((a if a is not None else ends[0], b if b is not None else ends[1]) for a, b in zip_longest(left, right))
    writer.append(np.concatenate([a, gap, b], axis=1) for a, b in pairs)
    writer.close()


def last_frame(path: Path) -> NDArray[np.uint8]:
    """Return the last frame of a video, uint8 (height, width, 3)."""
    return _read(path)[0][-1]


def _read(path: Path) -> tuple[list[NDArray[np.uint8]], int]:
    with pyav().open(str(path.absolute())) as video:
        frames = [frame.to_ndarray(format="rgb24") for frame in video.decode(video=0)]
        return frames, round(video.streams.video[0].average_rate)
