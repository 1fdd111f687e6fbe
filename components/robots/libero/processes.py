"""Simulators in processes of their own: MuJoCo and a driver that crash or hang take no run with them."""

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
    """The fields of a `RobotObservation`."""

    images: dict[str, Image]
    state: Vector
    task: str
    previous: None

    def observation(self) -> RobotObservation:
        return RobotObservation(self.images, self.state, self.task)


class StepReply(ReplyForm):
    """The fields of a `ChunkResult`, but its frames."""

    observation: ObservationReply
    success: bool
    steps: NonNegativeInt


class TakenStep(ReplyForm):
    """A step of a demonstration."""

    observation: ObservationReply
    action: Vector


class ProgressReply(ReplyForm):
    """The fields of a `GoalProgress`."""

    holds: bool
    reach: float
    grasped: bool
    place: float | None


class OutcomeReply(ReplyForm):
    """The fields of a `DemonstrationOutcome`."""

    success: bool
    steps: NonNegativeInt
    phase: str
    retries: NonNegativeInt


OBSERVATION, IMAGES, STEP = TypeAdapter(ObservationReply), TypeAdapter(dict[str, Image]), TypeAdapter(StepReply)
PROGRESS, TAKEN, OUTCOME = TypeAdapter(list[ProgressReply]), TypeAdapter(TakenStep), TypeAdapter(OutcomeReply)


@dataclass(frozen=True)
class ChunkResult:
    """What became of a chunk of actions.

    observation: After the last action that was carried out.
    success: The goal holds; later actions of the chunk were left out.
    steps: How many were carried out.
    frames: The images before each of them, by camera, if they were asked for.
    """

    observation: RobotObservation
    success: bool
    steps: int
    frames: list[dict[str, NDArray[np.uint8]]]


@dataclass(frozen=True)
class Demonstration:
    """Steps of (what was seen, the action taken then), and how it ended."""

    steps: list[tuple[RobotObservation, NDArray[np.float32]]]
    outcome: DemonstrationOutcome


class SimulatorProcess:
    """A worker with simulators by slot. They are gone when it was lost: then a slot is reset before it is stepped."""

    def __init__(self, settings: SimulatorSettings, timeout: float) -> None:
        """
        Args:
            timeout: Seconds for one reset, one step of a demonstration or one chunk's action.
        """
        self.worker = make_worker(WORKER, settings.model_dump(mode="json"), timeout=timeout)

    @property
    def alive(self) -> bool:
        """Whether its simulators are there; a reset makes it so."""
        return self.worker.alive

    def close(self) -> None:
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
        """As `LiberoSimulator.reset`; builds the simulator where the slot has another task.

        Raises:
            WorkerError: it failed.
        """
        changed = None if perturbation is None else asdict(perturbation)
        reply = self.worker.call("reset", slot, task.suite, task.index, initial_state, seed, changed, reply=OBSERVATION)
        return reply.observation()

    def step(self, actions: NDArray[np.float32], slot: int = 0, film: bool = False) -> ChunkResult:
        """Carry out actions (n, 7) until one succeeds; `film` keeps all images.

        Raises:
            WorkerError: it failed, or the slot has had no reset since its process started.
        """
        frames, reply = self.worker.stream(
            "step", slot, actions, film, part=IMAGES, most_parts=len(actions), reply=STEP
        )
        return ChunkResult(reply.observation.observation(), reply.success, reply.steps, frames if film else [])

    def progress(self, slot: int = 0) -> list[GoalProgress]:
        """As `LiberoSimulator.progress`.

        Raises:
            WorkerError: it failed, or the slot has had no reset since its process started.
        """
        return [GoalProgress(**dict(goal)) for goal in self.worker.call("progress", slot, reply=PROGRESS)]

    def demonstrate(self, task: LiberoTask, initial_state: int, seed: int, noise: float, limit: int) -> Demonstration:
        """As `demonstrate.demonstrate`, in slot 0.

        Raises:
            WorkerError: it failed.
        """
        arguments = task.suite, task.index, initial_state, seed, noise, limit
        steps, outcome = self.worker.stream("demonstrate", *arguments, part=TAKEN, most_parts=limit, reply=OUTCOME)
        seen = [(step.observation.observation(), step.action) for step in steps]
        return Demonstration(seen, DemonstrationOutcome(**dict(outcome)))
