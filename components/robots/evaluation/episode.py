"""Playing one episode: chunks of actions from observations, until the task is solved or the actions run out."""

from __future__ import annotations

import json
from base64 import b64decode, b64encode
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from armature.components.artifacts.json_lines import JsonLines
from armature.components.contracts.errors import DataError
from armature.components.contracts.robots import RobotObservation
from armature.components.machine.workers.channel import WorkerError
from armature.components.robots.evaluation.schedule import EpisodeKey, PlannedEpisode
from armature.components.robots.libero.processes import ChunkResult
from armature.components.robots.libero.progress import GoalProgress
from armature.components.robots.libero.settings import Perturbation
from armature.components.robots.libero.tasks import ACTION_NAMES, LiberoTask

Actions = NDArray[np.float32]
CameraImages = Mapping[str, NDArray[np.uint8]]
Actor = Callable[[RobotObservation, int], Actions]
"""Function from an observation and the chunk's number to actions (n, 7), n > 0."""


class LostBesideError(WorkerError):
    """The simulator is gone because its process died during another slot's call. This episode is not the cause."""

    code = "lost_beside"


class SimulatorClient(Protocol):
    """Client of one process with a simulator per slot. Every call raises WorkerError if the process dies.

    Example:
        >>> def first_success(process: SimulatorClient, planned: PlannedEpisode, actions: Actions) -> bool:
        ...     process.reset(planned.task, planned.initial_state, planned.simulator_seed)
        ...     return process.step(actions).success
    """

    def reset(
        self,
        task: LiberoTask,
        initial_state: int,
        seed: int,
        slot: int = 0,
        perturbation: Perturbation | None = None,
    ) -> RobotObservation: ...

    def step(self, actions: Actions, slot: int = 0, film: bool = False) -> ChunkResult: ...

    def progress(self, slot: int = 0) -> list[GoalProgress]: ...


@dataclass(frozen=True)
class PlayedEpisode:
    """Result of one episode.

    actions: the executed actions, (steps, 7). last: the observation after them. frames: camera images before each
    action and at the end, if filmed. progress: goal progress before each chunk and after the last, if measured.
    """

    success: bool
    actions: Actions
    last: RobotObservation
    frames: list[CameraImages] = field(default_factory=list)
    progress: list[list[GoalProgress]] = field(default_factory=list)

    @property
    def steps(self) -> int:
        """Number of executed actions."""
        return len(self.actions)


def play_episode(
    process: SimulatorClient,
    slot: int,
    planned: PlannedEpisode,
    actor: Actor,
    film: bool = False,
    measure: bool = False,
    action_dimensions: int = len(ACTION_NAMES),
) -> PlayedEpisode:
    """Play an episode in slot `slot` of a simulator process.

    Args:
        film: keep the camera images of every step. measure: record the goal progress.
        action_dimensions: number of values of an action of the robot.

    Raises:
        WorkerError: the simulator died, or its state is not finite.
        DataError: the policy returned something that is not an action.
    """
    observation = process.reset(planned.task, planned.initial_state, planned.simulator_seed, slot, planned.perturbation)
    _refuse_state(observation, planned, 0)
    carried_out: list[Actions] = []
    frames: list[CameraImages] = []
    progress = [process.progress(slot)] if measure else []
    steps, chunk, success, ended = 0, 0, False, False
    while steps < planned.max_steps and not success and not ended:
        actions = _checked(actor(observation, chunk), planned, chunk, action_dimensions)[: planned.max_steps - steps]
        carried = process.step(actions, slot, film)
        carried_out.append(actions[: carried.steps])
        frames += carried.frames
        progress += [process.progress(slot)] if measure else []
        observation, success, ended = carried.observation, carried.success, carried.ended
        steps, chunk = steps + carried.steps, chunk + 1
        _refuse_state(observation, planned, chunk)
    if film:
        frames.append(observation.images)
    return PlayedEpisode(success, np.concatenate(carried_out), observation, frames, progress)


def replay_episode(process: SimulatorClient, slot: int, planned: PlannedEpisode, actions: Actions) -> PlayedEpisode:
    """Repeat an episode from its recorded actions, and keep the camera images of every step.

    Raises:
        WorkerError: the simulator died.
    """
    again = replace(planned, max_steps=len(actions))
    return play_episode(process, slot, again, lambda _observation, _chunk: actions, film=True)


def _refuse_state(observation: RobotObservation, planned: PlannedEpisode, chunk: int) -> None:
    """Raise an error if the state is not finite. Policies would read NaN as 0, as the released policy does."""
    if not np.isfinite(observation.state).all():
        raise WorkerError(
            "the simulator's state is not finite",
            code="state_not_finite",
            where=f"{planned.name}, before chunk {chunk}",
            remedy="the physics diverged: look at the previous actions, or leave out this initial state",
        )


def _checked(actions: Actions, planned: PlannedEpisode, chunk: int, dimensions: int) -> Actions:
    if actions.ndim != 2 or not len(actions) or actions.shape[1] != dimensions:
        raise DataError(
            f"the policy returned actions of shape {actions.shape}, the robot takes (n, {dimensions})",
            code="action_shape_mismatch",
            where=f"{planned.name}, chunk {chunk}",
            remedy="evaluate a policy that was trained on the actions of this robot",
        )
    if not np.isfinite(actions).all():
        raise DataError(
            "the policy returned actions that are not finite",
            code="actions_not_finite",
            where=f"{planned.name}, chunk {chunk}",
            remedy="check the policy's weights and its normalization statistics",
        )
    return actions


# --- Journal of finished episodes, so that a crash loses none of them ---


@dataclass(frozen=True)
class EpisodeOutcome:
    """Result of a planned episode, played or given up.

    failure: why it could not be played in any attempt; None if it was played. lost: number of attempts in which the
    simulator died. seconds: duration of the last attempt, including waiting for the policy.
    """

    success: bool
    actions: Actions
    failure: str | None
    lost: int
    seconds: float

    @property
    def steps(self) -> int:
        """Number of executed actions."""
        return len(self.actions)


class EvaluationJournal:
    """File with one JSON line per finished episode. Thread-safe."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._lines = JsonLines(path)

    def append(self, planned: PlannedEpisode, outcome: EpisodeOutcome) -> None:
        """Write the outcome of an episode."""
        row = {**vars(outcome), "key": planned.key, "actions": _packed(outcome.actions)}
        self._lines.append(json.dumps(row).encode())

    def read(self) -> dict[EpisodeKey, EpisodeOutcome]:
        """Return all outcomes in the file."""
        rows = self._lines.read()
        return {tuple(row.pop("key")): EpisodeOutcome(**{**row, "actions": _unpacked(row["actions"])}) for row in rows}


def _packed(actions: Actions) -> dict[str, Any]:
    return {"shape": actions.shape, "data": b64encode(np.ascontiguousarray(actions, "<f4").tobytes()).decode()}


def _unpacked(packed: dict[str, Any]) -> Actions:
    return np.frombuffer(b64decode(packed["data"]), "<f4").reshape(packed["shape"])
