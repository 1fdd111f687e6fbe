"""Videos of successes and failures, made by carrying out the recorded actions again.

Which episodes deserve a video is known when all are played; rendering every step of every episode would cost many
times the physics. The simulator is deterministic, so the repetition shows the same episode.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import zip_longest
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from armature.components.machine.workers.channel import WorkerError
from armature.components.robots.datasets.lerobot.video import VideoSettings, VideoWriter, pyav
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
    """The first `each` successes and as many failures of every task, and of every perturbation over all tasks; what
    could not be played has no actions."""
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
    arena: SimulatorClient,
    attempts: int,
) -> Iterator[tuple[PlannedEpisode, PlayedEpisode]]:
    """Each episode again, with its images.

    Raises:
        WorkerError: the simulator was lost in every attempt.
    """
    for episode in picked:
        yield episode, _again(arena, episode, outcomes[episode.key].actions, attempts)


def _again(arena: SimulatorClient, episode: PlannedEpisode, actions: Actions, attempts: int) -> PlayedEpisode:
    for _ in range(attempts - 1):
        with suppress(WorkerError):
            return replay_episode(arena, 0, episode, actions)
    return replay_episode(arena, 0, episode, actions)


def differs(played: PlayedEpisode, recorded: EpisodeOutcome) -> str | None:
    """How a repetition ended otherwise than the episode did; None where it is the same."""
    if (played.success, played.steps) == (recorded.success, recorded.steps):
        return None
    return (
        f"played again, it ended with success {played.success} after {played.steps} steps; "
        f"before, with success {recorded.success} after {recorded.steps}"
    )


def write_video(folder: Path, episode: PlannedEpisode, images: Sequence[CameraImages], fps: int) -> str:
    """All cameras side by side. Returns the path inside `folder`."""
    frames = [side_by_side(each) for each in images]
    height, width, _ = frames[0].shape
    relative = video_path(episode.key)
    writer = VideoWriter(folder / relative, fps, width, height, ENCODING)
    writer.append(frames)
    writer.close()
    return relative


def side_by_side(images: CameraImages) -> NDArray[np.uint8]:
    """Cameras of one moment in one image, cut to even sides as the pixel format needs."""
    joined = np.concatenate(list(images.values()), axis=1)
    return joined[: joined.shape[0] // 2 * 2, : joined.shape[1] // 2 * 2]


# Videos of two evaluations side by side: the same beginning, played by two policies.

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
