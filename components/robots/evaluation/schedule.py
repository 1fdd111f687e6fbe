"""Which episodes are played, and by which seeds."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256

from armature.components.contracts.errors import ConfigurationError
from armature.components.robots.evaluation.settings import LiberoEvaluationSettings
from armature.components.robots.libero.settings import Perturbation, SimulatorSettings
from armature.components.robots.libero.tasks import LiberoTask, refuse_unreachable, suite_tasks

TaskKey = tuple[str, int]
EpisodeKey = tuple[str, int, int] | tuple[str, int, int, str]
"""Suite, task, episode; then the label of its perturbation, if it has one."""


@dataclass(frozen=True, slots=True)
class PlannedEpisode:
    """One episode. `episode` counts within the task; `repetition` how often its initial state came before.

    A perturbed one differs in its perturbation alone from the episode that it is compared with.
    """

    task: LiberoTask
    episode: int
    initial_state: int
    repetition: int
    simulator_seed: int
    max_steps: int
    perturbation: Perturbation | None = None

    @property
    def key(self) -> EpisodeKey:
        own = (self.task.suite, self.task.index, self.episode)
        return own if self.perturbation is None else (*own, self.perturbation.label)

    @property
    def name(self) -> str:
        name = f"{self.task.suite} task {self.task.index} episode {self.episode} (initial state {self.initial_state})"
        return name if self.perturbation is None else f"{name} with {self.perturbation.label}"


def plan_episodes(
    settings: LiberoEvaluationSettings, known: Mapping[str, Sequence[LiberoTask]]
) -> list[PlannedEpisode]:
    """Every episode, by suite, task and number, then all of them with each perturbation.

    Args:
        known: the tasks of each suite.

    Raises:
        ConfigurationError: a suite has no task of a number that is asked for, or a task no such initial state.
    """
    planned: list[PlannedEpisode] = []
    for suite in settings.suites:
        for task in tasks_of(suite, known[suite], settings.tasks, "evaluation.tasks"):
            planned += _of_task(task, settings, settings.max_steps[suite])
    perturbations = settings.perturbations.listed()
    return planned + [replace(each, perturbation=one) for one in perturbations for each in planned]


def refuse_episodes(settings: LiberoEvaluationSettings, simulator: SimulatorSettings) -> None:
    """Refuse before a training what the evaluation after it would refuse.

    Raises:
        ConfigurationError: as `plan_episodes` and `refuse_unreachable`.
    """
    known: dict[str, Sequence[LiberoTask]] = {suite: suite_tasks(suite) for suite in settings.suites}
    refuse_unreachable(dict.fromkeys(each.task for each in plan_episodes(settings, known)), simulator)


def _of_task(task: LiberoTask, settings: LiberoEvaluationSettings, max_steps: int) -> list[PlannedEpisode]:
    states = states_of(task, settings.initial_states, "evaluation.initial_states")
    return [
        PlannedEpisode(
            task=task,
            episode=episode,
            initial_state=states[episode % len(states)],
            repetition=episode // len(states),
            simulator_seed=settings.seed + episode,
            max_steps=max_steps,
        )
        for episode in range(settings.episodes_per_task)
    ]


def tasks_of(suite: str, known: Sequence[LiberoTask], chosen: Sequence[int], where: str) -> list[LiberoTask]:
    """Return the tasks with the `chosen` numbers, or all of the suite, by number.

    Raises:
        ConfigurationError: the suite has no such task.
    """
    by_index = {task.index: task for task in known}
    if missing := sorted(set(chosen) - set(by_index)):
        raise ConfigurationError(
            f"{suite} has no task {', '.join(map(str, missing))}",
            code="unknown_task",
            where=where,
            remedy=f"choose from 0 to {max(by_index)}, or leave it empty for all",
        )
    return [by_index[index] for index in sorted(chosen or by_index)]


def states_of(task: LiberoTask, chosen: Sequence[int], where: str) -> Sequence[int]:
    """The initial states that are `chosen`, or all of the task.

    Raises:
        ConfigurationError: the task has no such initial state.
    """
    states = chosen or range(task.initial_states)
    if max(states) >= task.initial_states:
        raise ConfigurationError(
            f"task {task.index} of {task.suite} has no initial state {max(states)}",
            code="unknown_initial_state",
            where=where,
            remedy=f"choose from 0 to {task.initial_states - 1}, or leave it empty for all",
        )
    return states


def noise_seed(settings: LiberoEvaluationSettings, planned: PlannedEpisode, chunk: int) -> int:
    """Seed in [0, 2**63) of the noise that the `chunk`-th answer of an episode is sampled from.

    It hangs on what the episode is, never on when, where or beside which others it is played. LeRobot's hangs on
    the batch (spec: seeds are summed over its rows), so that batch sizes are different experiments there.
    """
    parts: list[object] = [settings.eval_seed, chunk]
    if settings.per_episode_seed:
        parts += [planned.task.suite, planned.task.index, planned.initial_state, planned.repetition]
    return int.from_bytes(sha256(json.dumps(parts).encode()).digest()[:8], "big") >> 1
