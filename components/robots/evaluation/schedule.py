"""Schedule of an evaluation: the episodes that are played and their seeds."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256

from armature.components.contracts.errors import ConfigurationError
from armature.components.robots.evaluation.settings import LiberoEvaluationSettings, PolicyEvaluationSettings
from armature.components.robots.libero.pro import base_suite
from armature.components.robots.libero.settings import Perturbation, SimulatorSettings
from armature.components.robots.libero.tasks import LiberoTask, refuse_missing_shapes, refuse_unreachable, suite_tasks

TaskKey = tuple[str, int]
EpisodeKey = tuple[str, int, int] | tuple[str, int, int, str]
"""Identity of an episode: suite, task number, episode number, and the label of its perturbation if it has one."""


@dataclass(frozen=True, slots=True)
class PlannedEpisode:
    """An episode to play.

    `episode` counts within the task; `repetition` is the number of earlier episodes from the same initial state. A
    perturbed episode differs from the unperturbed one it is compared with only in `perturbation`.
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
        """Identity of the episode within its evaluation."""
        key = (self.task.suite, self.task.index, self.episode)
        return key if self.perturbation is None else (*key, self.perturbation.label)

    @property
    def name(self) -> str:
        """Name of the episode in messages."""
        name = f"{self.task.suite} task {self.task.index} episode {self.episode} (initial state {self.initial_state})"
        return name if self.perturbation is None else f"{name} with {self.perturbation.label}"


def plan_episodes(
    settings: LiberoEvaluationSettings, tasks: Mapping[str, Sequence[LiberoTask]]
) -> list[PlannedEpisode]:
    """Return all episodes by suite, task and number, then all of them again for each perturbation.

    Args:
        tasks: the tasks of each suite.

    Raises:
        ConfigurationError: a suite does not have a task, or a task not an initial state, that the settings name.
    """
    planned: list[PlannedEpisode] = []
    limits = {str(suite): steps for suite, steps in settings.max_steps.items()}
    for suite in settings.suites:
        for task in tasks_of(suite, tasks[suite], settings.tasks, "evaluation.tasks"):
            planned += _of_task(task, settings, limits[base_suite(suite)])
    perturbations = settings.perturbations.listed()
    return planned + [replace(each, perturbation=one) for one in perturbations for each in planned]


def refuse_episodes(settings: LiberoEvaluationSettings, simulator: SimulatorSettings) -> None:
    """Refuse evaluation settings early, before a training that precedes the evaluation.

    Raises:
        ConfigurationError: see `plan_episodes`, `refuse_unreachable` and `refuse_missing_shapes`.
    """
    tasks: dict[str, Sequence[LiberoTask]] = {suite: suite_tasks(suite) for suite in settings.suites}
    played = dict.fromkeys(each.task for each in plan_episodes(settings, tasks))
    refuse_unreachable(played, simulator)
    refuse_missing_shapes(played, simulator)


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


def tasks_of(suite: str, tasks: Sequence[LiberoTask], chosen: Sequence[int], where: str) -> list[LiberoTask]:
    """Return the tasks with the `chosen` numbers, or all tasks of the suite, sorted by number.

    Raises:
        ConfigurationError: the suite does not have one of the tasks.
    """
    by_index = {task.index: task for task in tasks}
    if missing := sorted(set(chosen) - set(by_index)):
        raise ConfigurationError(
            f"{suite} has no task {', '.join(map(str, missing))}",
            code="unknown_task",
            where=where,
            remedy=f"choose from 0 to {max(by_index)}, or leave it empty for all",
        )
    return [by_index[index] for index in sorted(chosen or by_index)]


def states_of(task: LiberoTask, chosen: Sequence[int], where: str) -> Sequence[int]:
    """Return the `chosen` initial states, or all of the task.

    Raises:
        ConfigurationError: the task does not have one of the initial states.
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


def noise_seed(settings: PolicyEvaluationSettings, planned: PlannedEpisode, chunk: int) -> int:
    """Return the seed, in [0, 2**63), of the noise that chunk number `chunk` of an episode is sampled from.

    The seed depends on the episode only, not on when, where or next to which other episodes it is played. LeRobot's
    seed depends on the batch (the seeds of its rows are summed), so different batch sizes are different experiments.
    """
    parts: list[object] = [settings.eval_seed, chunk]
    if settings.per_episode_seed:
        parts += [planned.task.suite, planned.task.index, planned.initial_state, planned.repetition]
    return int.from_bytes(sha256(json.dumps(parts).encode()).digest()[:8], "big") >> 1
