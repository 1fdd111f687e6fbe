"""All episodes of an evaluation: players in threads, simulators in processes, one policy."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from components.contracts.errors import ArmatureError
from components.contracts.robots import RobotObservation, RobotPolicy
from components.environments.libero.processes import SimulatorError
from components.environments.libero.tasks import ACTION_NAMES
from components.evaluation.libero.batching import PolicyDesk
from components.evaluation.libero.episode import Actions, Arena, play_episode
from components.evaluation.libero.journal import Journal, Outcome
from components.evaluation.libero.schedule import EpisodeKey, Planned, Schedule, TaskKey, noise_seed
from components.evaluation.libero.settings import LiberoEvaluationSettings


class Told(Protocol):
    """Called after each episode: what became of all that are finished, and of this one."""

    def __call__(self, finished: Collection[Outcome], latest: Outcome, /) -> None: ...


@dataclass(frozen=True)
class Seat:
    """Where a player plays: a simulator of a process."""

    arena: Arena
    slot: int


def seats(arenas: Sequence[Arena], count: int) -> list[Seat]:
    """`count` simulators, spread evenly over the processes."""
    return [Seat(arenas[i % len(arenas)], i // len(arenas)) for i in range(count)]


class Evaluation:
    """Plays what the journal does not have yet, and writes it there."""

    def __init__(
        self,
        settings: LiberoEvaluationSettings,
        planned: Sequence[Planned],
        journal: Journal,
        told: Told,
    ) -> None:
        self._settings, self._planned, self._journal, self._told = settings, planned, journal, told
        self.outcomes: dict[EpisodeKey, Outcome] = {}
        self._lock = threading.Lock()

    def run(self, policy: RobotPolicy, arenas: Sequence[Arena]) -> Mapping[EpisodeKey, Outcome]:
        """The outcome of every planned episode; none depends on the number of arenas or `settings.batch`.

        Raises:
            SimulatorError: more episodes than `failed_episodes` could not be played.
            DataError: the policy answered with something that is no action.
        """
        wanted = {planned.key for planned in self._planned}
        known = self._journal.read().items()
        self.outcomes = {key: outcome for key, outcome in known if key in wanted and outcome.failure is None}
        left = [planned for planned in self._planned if planned.key not in self.outcomes]
        desk = PolicyDesk(policy, self._settings.batch)
        schedule = Schedule(left)
        count = min(self._settings.batch, len(left))
        desk.serve([self._player(seat, schedule, desk) for seat in seats(arenas, count)])
        return self.outcomes

    def _player(self, seat: Seat, schedule: Schedule, desk: PolicyDesk) -> Callable[[], None]:
        def play() -> None:
            held: TaskKey | None = None
            while (planned := schedule.take(held)) is not None:
                held = planned.key[:2]
                self._finish(planned, self._outcome(seat, planned, desk))

        return play

    def _outcome(self, seat: Seat, planned: Planned, desk: PolicyDesk) -> Outcome:
        def actor(observation: RobotObservation, chunk: int) -> Actions:
            return desk.ask(observation, noise_seed(self._settings, planned, chunk))

        problem: ArmatureError | None = None
        for attempt in range(self._settings.attempts):
            started = time.monotonic()
            try:
                played = play_episode(seat.arena, seat.slot, planned, actor)
            except SimulatorError as error:
                problem = error
            else:
                return Outcome(played.success, played.actions, None, attempt, time.monotonic() - started)
        nothing = np.zeros((0, len(ACTION_NAMES)), np.float32)
        return Outcome(False, nothing, str(problem), self._settings.attempts, time.monotonic() - started)

    def _finish(self, planned: Planned, outcome: Outcome) -> None:
        with self._lock:
            self.outcomes[planned.key] = outcome
            failed = [each for each in self.outcomes.values() if each.failure is not None]
            if len(failed) > self._settings.failed_episodes:
                raise SimulatorError(
                    f"{len(failed)} episodes could not be played, {self._settings.failed_episodes} may fail: "
                    f"{outcome.failure}",
                    where=planned.name,
                    remedy="see the simulators' logs; finished episodes are kept, the next attempt goes on from them",
                )
            self._journal.append(planned, outcome)
            self._told(self.outcomes.values(), outcome)
