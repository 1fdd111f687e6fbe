"""Videos of the episodes of a served benchmark, written while they are played."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from armature.components.robots.datasets.lerobot.video import VideoWriter
from armature.components.robots.evaluation.episode import Actions, EpisodeOutcome, PlayedEpisode
from armature.components.robots.evaluation.page import LastFrame
from armature.components.robots.evaluation.results import LiberoResult, video_path
from armature.components.robots.evaluation.run import SimulatorSlot
from armature.components.robots.evaluation.schedule import EpisodeKey, PlannedEpisode
from armature.components.robots.evaluation.videos import ENCODING, chosen, last_frame, side_by_side
from armature.components.robots.libero.processes import ChunkResult
from armature.components.robots.served.connection import BenchmarkConnection

Attempt = Callable[[SimulatorSlot, PlannedEpisode], PlayedEpisode]
"""Plays an episode once."""


class EpisodeFilms:
    """Videos of the first successes and failures of each task.

    They are written while the episodes are played, because a benchmark may not repeat an episode exactly.

    Args:
        folder: for the videos, which outlive this process.
        each: number of successes, and of failures, of a task.
        fps: frames per second.
    """

    def __init__(self, folder: Path, each: int, fps: int) -> None:
        self._folder, self._each, self._fps = folder, each, fps

    def play(self, planned: PlannedEpisode, connection: BenchmarkConnection, attempt: Attempt) -> PlayedEpisode:
        """Play an episode, and film it if its task needs a video of a success or a failure."""
        kept = {success: self._path(planned, success) for success in (True, False)}
        if not any(map(self._wanted, kept.values())):
            return attempt(SimulatorSlot(connection, 0), planned)
        filmed = _FilmedConnection(connection, self._folder / f"{planned.task.index}.mp4", self._fps)
        try:
            played = attempt(SimulatorSlot(filmed, 0), planned)
        finally:
            filmed.close()
        if self._wanted(path := kept[played.success]):
            filmed.path.replace(path)
        return played

    def collect(
        self,
        planned: Sequence[PlannedEpisode],
        outcomes: Mapping[EpisodeKey, EpisodeOutcome],
        results: Sequence[LiberoResult],
        out: Path,
    ) -> list[LastFrame]:
        """Copy the videos to the folder `out` and return their last frames."""
        by_key: dict[EpisodeKey, LiberoResult] = {result.key: result for result in results}
        stills = []
        for episode in chosen(planned, outcomes, self._each):
            path = self._path(episode, outcomes[episode.key].success)
            if path.is_file():
                video = video_path(episode.key)
                (out / video).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, out / video)
                stills.append(LastFrame(episode.key, by_key[episode.key], last_frame(path), video))
        return stills

    def _path(self, planned: PlannedEpisode, success: bool) -> Path:
        return self._folder / f"{planned.task.index}-{planned.episode}-{success}.mp4"

    def _wanted(self, path: Path) -> bool:
        task, _, ending = path.name.split("-")
        return len({*self._folder.glob(f"{task}-*-{ending}")} - {path}) < self._each


class _FilmedConnection:
    """A `SimulatorClient` that writes the images before each action to a video."""

    def __init__(self, connection: BenchmarkConnection, path: Path, fps: int) -> None:
        self._connection, self.path, self._fps = connection, path, fps
        self._writer: VideoWriter | None = None
        self.reset, self.progress = connection.reset, connection.progress

    def step(self, actions: Actions, slot: int = 0, film: bool = False) -> ChunkResult:
        result = self._connection.step(actions, slot, film=True)
        frames = [side_by_side(images) for images in result.frames]
        if self._writer is None:
            height, width, _ = frames[0].shape
            self._writer = VideoWriter(self.path, self._fps, width, height, ENCODING)
        self._writer.append(frames)
        return replace(result, frames=[])

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
