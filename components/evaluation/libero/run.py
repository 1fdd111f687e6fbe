"""Many episodes: players in threads, simulators in processes, one policy; and those of an evaluation."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

from armature.components.contracts.robots import RobotObservation, RobotPolicy
from armature.components.environments.libero.tasks import ACTION_NAMES
from armature.components.evaluation.libero.batching import InferenceQueue
from armature.components.evaluation.libero.episode import (
    Actions,
    LostBesideError,
    PlayedEpisode,
    SimulatorClient,
    play_episode,
)
from armature.components.evaluation.libero.journal import EpisodeOutcome, EvaluationJournal
from armature.components.evaluation.libero.schedule import EpisodeKey, PlannedEpisode, TaskKey, noise_seed
from armature.components.evaluation.libero.settings import LiberoEvaluationSettings
from armature.components.workers.errors import WorkerError
from armature.components.workers.pool import StickyQueue

ResultT = TypeVar("ResultT")


class ProgressCallback(Protocol):
    """Called after each episode: what became of all that are finished, and of this one."""

    def __call__(self, finished: Collection[EpisodeOutcome], latest: EpisodeOutcome, /) -> None: ...


@dataclass(frozen=True)
class SimulatorSlot:
    """Where a player plays: a simulator of a process."""

    arena: SimulatorClient
    slot: int


def simulator_slots(arenas: Sequence[SimulatorClient], count: int) -> list[SimulatorSlot]:
    """`count` simulators, spread evenly over the processes."""
    return [SimulatorSlot(arenas[i % len(arenas)], i // len(arenas)) for i in range(count)]


def task_of(planned: PlannedEpisode) -> TaskKey:
    return planned.key[:2]


@dataclass(frozen=True)
class AttemptedEpisode(Generic[ResultT]):
    """The result of an episode, None if all attempts failed, and then the last `problem`.

    lost: attempts that ended with the simulator. seconds: of the last attempt, waiting for the policy included.
    """

    result: ResultT | None
    problem: WorkerError | None
    lost: int
    seconds: float


class EpisodePlayer:
    """Plays planned episodes: players in threads, simulators in processes, one policy that answers those that wait.

    No result depends on the number of arenas or on `batch`.

    Args:
        batch: episodes that are played at once.
        attempts: how often an episode is begun whose simulator dies on the way. If the process was lost during
            another slot's call, the attempt is not counted: whether an episode fails would else depend on its
            neighbors.
    """

    def __init__(self, arenas: Sequence[SimulatorClient], batch: int, attempts: int) -> None:
        self._arenas, self._batch, self._attempts = arenas, batch, attempts
        self._held: dict[SimulatorSlot, TaskKey] = {}
        """The task that each simulator was built for: building one takes seconds."""
        self._lock = threading.Lock()

    def play(
        self,
        planned: Sequence[PlannedEpisode],
        queue: InferenceQueue[Any],
        attempt: Callable[[SimulatorSlot, PlannedEpisode], ResultT],
        finish: Callable[[PlannedEpisode, AttemptedEpisode[ResultT]], None],
    ) -> None:
        """Play all episodes.

        Args:
            queue: the policy, which `attempt` asks.
            attempt: plays an episode; raises WorkerError if the simulator was lost.
            finish: is called after each episode, by one thread at a time. What it raises ends all.
        """
        slots = simulator_slots(self._arenas, min(self._batch, len(planned)))
        before = [self._held[slot] for slot in slots if slot in self._held]
        schedule = StickyQueue(planned, task_of, before)

        def play_at(simulator: SimulatorSlot) -> None:
            while (episode := schedule.take(self._held.get(simulator))) is not None:
                self._held[simulator] = task_of(episode)
                attempted = self._repeat(partial(attempt, simulator, episode))
                with self._lock:
                    finish(episode, attempted)

        queue.serve([partial(play_at, simulator) for simulator in slots])

    def _repeat(self, attempt: Callable[[], ResultT]) -> AttemptedEpisode[ResultT]:
        problems: list[WorkerError] = []
        lost = 0
        while True:
            started = time.monotonic()
            try:
                return AttemptedEpisode(attempt(), None, lost, time.monotonic() - started)
            except WorkerError as error:
                problems += [error] * (not isinstance(error, LostBesideError))
                lost += 1
            if len(problems) == self._attempts:
                return AttemptedEpisode(None, problems[-1], lost, time.monotonic() - started)


class Evaluation:
    """Plays what the journal does not have yet, and writes it there."""

    def __init__(
        self,
        settings: LiberoEvaluationSettings,
        planned: Sequence[PlannedEpisode],
        journal: EvaluationJournal,
        told: ProgressCallback,
    ) -> None:
        self._settings, self._planned, self._journal, self._told = settings, planned, journal, told
        self.outcomes: dict[EpisodeKey, EpisodeOutcome] = {}

    def run(self, policy: RobotPolicy, arenas: Sequence[SimulatorClient]) -> Mapping[EpisodeKey, EpisodeOutcome]:
        """Return the outcome of every planned episode.

        Raises:
            WorkerError: more episodes than `failed_episodes` could not be played.
            DataError: the policy answered with something that is not an action.
        """
        wanted = {planned.key for planned in self._planned}
        known = self._journal.read().items()
        self.outcomes = {key: outcome for key, outcome in known if key in wanted and outcome.failure is None}
        left = [planned for planned in self._planned if planned.key not in self.outcomes]
        queue = InferenceQueue(policy.predict, policy.rows_per_pass, policy.prepared)

        def attempt(simulator: SimulatorSlot, planned: PlannedEpisode) -> PlayedEpisode:
            def actor(observation: RobotObservation, chunk: int) -> Actions:
                return queue.ask(observation, noise_seed(self._settings, planned, chunk)).result()

            return play_episode(simulator.arena, simulator.slot, planned, actor)

        EpisodePlayer(arenas, self._settings.batch, self._settings.attempts).play(left, queue, attempt, self._finish)
        return self.outcomes

    def _finish(self, planned: PlannedEpisode, attempted: AttemptedEpisode[PlayedEpisode]) -> None:
        played, lost, seconds = attempted.result, attempted.lost, attempted.seconds
        if played is not None:
            outcome = EpisodeOutcome(played.success, played.actions, None, lost, seconds)
        else:
            nothing = np.zeros((0, len(ACTION_NAMES)), np.float32)
            outcome = EpisodeOutcome(False, nothing, str(attempted.problem), lost, seconds)
        self.outcomes[planned.key] = outcome
        failed = sum(each.failure is not None for each in self.outcomes.values())
        if failed > self._settings.failed_episodes:
            raise WorkerError(
                f"{failed} episodes could not be played, {self._settings.failed_episodes} may fail: {outcome.failure}",
                code="too_many_episodes_failed",
                where=planned.name,
                remedy="see the simulators' logs; finished episodes are kept, the next attempt resumes from them",
            )
        self._journal.append(planned, outcome)
        self._told(self.outcomes.values(), outcome)
