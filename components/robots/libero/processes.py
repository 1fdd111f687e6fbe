"""Simulators in separate processes, so that a crash or hang of MuJoCo or of a driver does not end the run."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Annotated, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import NonNegativeInt, PlainValidator, TypeAdapter

from armature.components.contracts.robots import RobotObservation
from armature.components.machine.workers.requests import ReplyForm, array_of
from armature.components.machine.workers.worker import make_worker
from armature.components.robots.libero.progress import GoalProgress
from armature.components.robots.libero.scripted.policy import DemonstrationOutcome
from armature.components.robots.libero.settings import Perturbation, SimulatorSettings
from armature.components.robots.libero.tasks import LiberoTask

WORKER = "armature.components.robots.libero.worker"

Image = Annotated[NDArray[np.uint8], PlainValidator(array_of(np.uint8, 3))]
Vector = Annotated[NDArray[np.float32], PlainValidator(array_of(np.float32, 1))]


class ObservationReply(ReplyForm):
    """Reply with the fields of a `RobotObservation`."""

    images: dict[str, Image]
    state: Vector
    task: str
    previous: None

    def observation(self) -> RobotObservation:
        """Return the reply as an observation."""
        return RobotObservation(self.images, self.state, self.task)


class StepReply(ReplyForm):
    """Reply with the fields of a `ChunkResult` except its frames."""

    observation: ObservationReply
    success: bool
    steps: NonNegativeInt


class TakenStep(ReplyForm):
    """Reply with one step of a demonstration."""

    observation: ObservationReply
    action: Vector


class ProgressReply(ReplyForm):
    """Reply with the fields of a `GoalProgress`."""

    holds: bool
    reach: float
    grasped: bool
    place: float | None


class OutcomeReply(ReplyForm):
    """Reply with the fields of a `DemonstrationOutcome`."""

    success: bool
    steps: NonNegativeInt
    phase: str
    retries: NonNegativeInt


OBSERVATION, IMAGES, STEP = TypeAdapter(ObservationReply), TypeAdapter(dict[str, Image]), TypeAdapter(StepReply)
PROGRESS, TAKEN, OUTCOME = TypeAdapter(list[ProgressReply]), TypeAdapter(TakenStep), TypeAdapter(OutcomeReply)


@dataclass(frozen=True)
class ChunkResult:
    """Result of executing a chunk of actions.

    observation: after the last executed action.
    success: the goal holds; the remaining actions of the chunk were not executed.
    steps: number of executed actions.
    frames: images by camera before each executed action, if requested.
    ended: the simulator ended the episode.
    """

    observation: RobotObservation
    success: bool
    steps: int
    frames: list[dict[str, NDArray[np.uint8]]]
    ended: bool = False


@dataclass(frozen=True)
class Demonstration:
    """Recorded demonstration: pairs of observation and action, and the outcome."""

    steps: list[tuple[RobotObservation, NDArray[np.float32]]]
    outcome: DemonstrationOutcome


class SimulatorProcess:
    """Client of a worker process that holds one simulator per slot.

    When the process dies, its simulators are lost; a slot then needs a reset before its next step.

    Example:
        >>> def first_observation(settings: SimulatorSettings, task: LiberoTask) -> RobotObservation:
        ...     with SimulatorProcess(settings, timeout=300.0) as process:
        ...         return process.reset(task, initial_state=0, seed=0)
    """

    def __init__(self, settings: SimulatorSettings, timeout: float, broken_starts: bool = False) -> None:
        """Start the process.

        Args:
            timeout: maximum seconds of a reset, of a demonstration's step or of one action of a chunk.
            broken_starts: see `LiberoSimulator`.
        """
        arguments = settings.model_dump(mode="json") | {"broken_starts": broken_starts}
        self.worker = make_worker(WORKER, arguments, timeout=timeout)

    @property
    def alive(self) -> bool:
        """True if the process runs. A reset starts it if it does not."""
        return self.worker.alive

    def close(self) -> None:
        """End the process."""
        self.worker.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def reset(
        self,
        task: LiberoTask,
        initial_state: int,
        seed: int,
        slot: int = 0,
        perturbation: Perturbation | None = None,
    ) -> RobotObservation:
        """Reset a slot, see `LiberoSimulator.reset`; a slot with another task gets a new simulator first.

        Raises:
            WorkerError: the process died or did not answer in time.
            DataError: the task does not begin as its file says.
        """
        changed = None if perturbation is None else asdict(perturbation)
        reply = self.worker.call("reset", slot, task.suite, task.index, initial_state, seed, changed, reply=OBSERVATION)
        return reply.observation()

    def step(self, actions: NDArray[np.float32], slot: int = 0, film: bool = False) -> ChunkResult:
        """Execute actions (n, 7) until one of them solves the task. film: return the images of every step.

        Raises:
            WorkerError: the process died, or the slot was not reset since the process started.
        """
        frames, reply = self.worker.stream(
            "step", slot, actions, film, part=IMAGES, most_parts=len(actions), reply=STEP
        )
        return ChunkResult(reply.observation.observation(), reply.success, reply.steps, frames if film else [])

    def progress(self, slot: int = 0) -> list[GoalProgress]:
        """Return the goal progress of a slot, see `LiberoSimulator.progress`.

        Raises:
            WorkerError: the process died, or the slot was not reset since the process started.
        """
        return [GoalProgress(**dict(goal)) for goal in self.worker.call("progress", slot, reply=PROGRESS)]

    def demonstrate(self, task: LiberoTask, initial_state: int, seed: int, noise: float, limit: int) -> Demonstration:
        """Play an episode with the scripted policy in slot 0, see `scripted.policy.demonstrate`.

        Raises:
            WorkerError: the process died or did not answer in time.
        """
        arguments = task.suite, task.index, initial_state, seed, noise, limit
        steps, outcome = self.worker.stream("demonstrate", *arguments, part=TAKEN, most_parts=limit, reply=OUTCOME)
        seen = [(step.observation.observation(), step.action) for step in steps]
        return Demonstration(seen, DemonstrationOutcome(**dict(outcome)))
