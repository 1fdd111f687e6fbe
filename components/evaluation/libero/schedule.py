"""Which episodes are played, by which seeds, and who plays which next."""

from __future__ import annotations

import json
import threading
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256

from components.contracts.errors import ConfigurationError
from components.environments.libero.tasks import LiberoTask
from components.evaluation.libero.settings import LiberoEvaluationSettings

TaskKey = tuple[str, int]
EpisodeKey = tuple[str, int, int]


@dataclass(frozen=True, slots=True)
class PlannedEpisode:
    """One episode. `episode` counts within the task; `repetition` how often its initial state came before."""

    task: LiberoTask
    episode: int
    initial_state: int
    repetition: int
    simulator_seed: int
    max_steps: int

    @property
    def key(self) -> EpisodeKey:
        return (self.task.suite, self.task.index, self.episode)

    @property
    def name(self) -> str:
        return f"{self.task.suite} task {self.task.index} episode {self.episode} (initial state {self.initial_state})"


def plan_episodes(
    settings: LiberoEvaluationSettings, known: Mapping[str, Sequence[LiberoTask]]
) -> list[PlannedEpisode]:
    """Every episode, by suite, task and number. `known` holds the tasks of each suite.

    Raises:
        ConfigurationError: a suite has no task of a number that is asked for.
    """
    planned: list[PlannedEpisode] = []
    for suite in settings.suites:
        by_index = {task.index: task for task in known[suite]}
        if missing := sorted(set(settings.tasks) - set(by_index)):
            raise ConfigurationError(
                f"{suite} has no task {', '.join(map(str, missing))}",
                where="evaluation.tasks",
                remedy=f"choose from 0 to {max(by_index)}, or leave it empty for all",
            )
        for index in sorted(settings.tasks or by_index):
            planned += _of_task(by_index[index], settings, settings.max_steps[suite])
    return planned


def _of_task(task: LiberoTask, settings: LiberoEvaluationSettings, max_steps: int) -> list[PlannedEpisode]:
    return [
        PlannedEpisode(
            task=task,
            episode=episode,
            initial_state=episode % task.initial_states,
            repetition=episode // task.initial_states,
            simulator_seed=settings.seed + episode,
            max_steps=max_steps,
        )
        for episode in range(settings.episodes_per_task)
    ]


def noise_seed(settings: LiberoEvaluationSettings, planned: PlannedEpisode, chunk: int) -> int:
    """Seed in [0, 2**63) of the noise that the `chunk`-th answer of an episode is sampled from.

    It hangs on what the episode is, never on when, where or beside which others it is played. LeRobot's hangs on
    the batch (spec: seeds are summed over its rows), so that batch sizes are different experiments there.
    """
    parts: list[object] = [settings.eval_seed, chunk]
    if settings.per_episode_seed:
        parts += [planned.task.suite, planned.task.index, planned.initial_state, planned.repetition]
    return int.from_bytes(sha256(json.dumps(parts).encode()).digest()[:8], "big") >> 1


class EpisodeSchedule:
    """Hands out episodes to players. A player keeps to its task while it has any, because building one takes 9 s;
    then it goes where most episodes wait for each player. Thread safe."""

    def __init__(self, planned: Iterable[PlannedEpisode]) -> None:
        self._waiting: dict[TaskKey, deque[PlannedEpisode]] = {}
        for episode in planned:
            self._waiting.setdefault(episode.key[:2], deque()).append(episode)
        self._players: Counter[TaskKey] = Counter()
        self._lock = threading.Lock()

    def take(self, held: TaskKey | None) -> PlannedEpisode | None:
        """The next episode for a player that has `held` built; None: there is none left."""
        with self._lock:
            if held is not None and self._waiting.get(held):
                return self._waiting[held].popleft()
            if held is not None:
                self._players[held] -= 1
            open_tasks = [key for key, episodes in self._waiting.items() if episodes]
            if not open_tasks:
                return None
            chosen = max(open_tasks, key=lambda key: len(self._waiting[key]) / (1 + self._players[key]))
            self._players[chosen] += 1
            return self._waiting[chosen].popleft()
