"""All episodes of an evaluation: players in threads, simulators in processes, one policy."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from armature.components.contracts.robots import RobotObservation, RobotPolicy
from armature.components.environments.libero.tasks import ACTION_NAMES
from armature.components.evaluation.libero.batching import InferenceQueue
from armature.components.evaluation.libero.episode import Actions, LostBesideError, SimulatorClient, play_episode
from armature.components.evaluation.libero.journal import EpisodeOutcome, EvaluationJournal
from armature.components.evaluation.libero.schedule import EpisodeKey, PlannedEpisode, TaskKey, noise_seed
from armature.components.evaluation.libero.settings import LiberoEvaluationSettings
from armature.components.workers.errors import WorkerError
from armature.components.workers.pool import StickyQueue


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
        self._lock = threading.Lock()

    def run(self, policy: RobotPolicy, arenas: Sequence[SimulatorClient]) -> Mapping[EpisodeKey, EpisodeOutcome]:
        """The outcome of every planned episode; none depends on the number of arenas or `settings.batch`.

        Raises:
            WorkerError: more episodes than `failed_episodes` could not be played.
            DataError: the policy answered with something that is not an action.
        """
        wanted = {planned.key for planned in self._planned}
        known = self._journal.read().items()
        self.outcomes = {key: outcome for key, outcome in known if key in wanted and outcome.failure is None}
        left = [planned for planned in self._planned if planned.key not in self.outcomes]
        queue = InferenceQueue(policy.predict, policy.rows_per_pass, policy.prepared)
        schedule = StickyQueue(left, task_of)  # building a task's simulator takes 9 s
        count = min(self._settings.batch, len(left))
        queue.serve([self._player(simulator, schedule, queue) for simulator in simulator_slots(arenas, count)])
        return self.outcomes

    def _player(
        self, simulator: SimulatorSlot, schedule: StickyQueue[PlannedEpisode], queue: InferenceQueue[Actions]
    ) -> Callable[[], None]:
        def play() -> None:
            held: TaskKey | None = None
            while (planned := schedule.take(held)) is not None:
                held = task_of(planned)
                self._finish(planned, self._outcome(simulator, planned, queue))

        return play

    def _outcome(
        self, simulator: SimulatorSlot, planned: PlannedEpisode, queue: InferenceQueue[Actions]
    ) -> EpisodeOutcome:
        def actor(observation: RobotObservation, chunk: int) -> Actions:
            return queue.ask(observation, noise_seed(self._settings, planned, chunk)).result()

        problems: list[WorkerError] = []
        lost = 0
        while len(problems) < self._settings.attempts:
            started = time.monotonic()
            try:
                played = play_episode(simulator.arena, simulator.slot, planned, actor)
            except WorkerError as error:
                problems += [error] * (not isinstance(error, LostBesideError))
                lost += 1
            else:
                return EpisodeOutcome(played.success, played.actions, None, lost, time.monotonic() - started)
        nothing = np.zeros((0, len(ACTION_NAMES)), np.float32)
        return EpisodeOutcome(False, nothing, str(problems[-1]), lost, time.monotonic() - started)

    def _finish(self, planned: PlannedEpisode, outcome: EpisodeOutcome) -> None:
        with self._lock:
            self.outcomes[planned.key] = outcome
            failed = [each for each in self.outcomes.values() if each.failure is not None]
            if len(failed) > self._settings.failed_episodes:
                raise WorkerError(
                    f"{len(failed)} episodes could not be played, {self._settings.failed_episodes} may fail: "
                    f"{outcome.failure}",
                    code="too_many_episodes_failed",
                    where=planned.name,
                    remedy="see the simulators' logs; finished episodes are kept, the next attempt resumes from them",
                )
            self._journal.append(planned, outcome)
            self._told(self.outcomes.values(), outcome)
