"""Videos of successes and failures, made by carrying out the recorded actions again.

Which episodes deserve a video is known when all are played; rendering every step of every episode would cost many
times the physics. The simulator is deterministic, so the repetition shows the same episode.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from armature.components.datasets.lerobot.video import VideoSettings, VideoWriter
from armature.components.evaluation.libero.episode import (
    Actions,
    CameraImages,
    PlayedEpisode,
    SimulatorClient,
    replay_episode,
)
from armature.components.evaluation.libero.eval_info import video_path
from armature.components.evaluation.libero.journal import EpisodeOutcome
from armature.components.evaluation.libero.schedule import EpisodeKey, PlannedEpisode
from armature.components.workers.errors import WorkerError

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
