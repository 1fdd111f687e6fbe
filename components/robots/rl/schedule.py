"""Schedule of rollouts: the episodes of each step and their seeds."""

from __future__ import annotations

import json
from collections.abc import Sequence
from hashlib import sha256

import numpy as np

from armature.components.robots.evaluation.schedule import PlannedEpisode, states_of, tasks_of
from armature.components.robots.libero.settings import Perturbation, SimulatorSettings
from armature.components.robots.libero.tasks import LiberoTask, refuse_missing_shapes, refuse_unreachable, suite_tasks
from armature.components.robots.rl.settings import RobotRolloutSettings


def plan_step(
    settings: RobotRolloutSettings, tasks: Sequence[LiberoTask], step: int, round_: int = 0
) -> list[list[PlannedEpisode]]:
    """Return the groups of episodes of round `round_` of `step`.

    Groups go through all (task, initial state) pairs, without a perturbation and with each, in a shuffled order before
    any repeats. Every step reserves
    the places of `max_rounds` rounds in this order; rounds that are not played leave theirs unused.

    The episodes of a group only differ in the policy's noise: they share `simulator_seed`, `episode` counts within the
    group, and `repetition` is the number of the group in the run.

    Args:
        tasks: all tasks of the suite.
        step: 1, 2, ...; 0 is the pre-flight check, which plays one group.

    Raises:
        ConfigurationError: the suite does not have a task, or a task not an initial state, that `settings` name.
    """
    begins = _begins(settings, tasks)
    count = settings.groups_per_step if step else 1
    first = ((step - 1) * settings.max_rounds + round_) * count if step else round_
    groups = []
    for number in range(first, first + count):
        lap, place = divmod(number, len(begins))
        order = np.random.default_rng((settings.seed, lap)).permutation(len(begins))
        task, state, perturbation = begins[order[place]]
        seed = _seed(settings.seed, "simulator", step, number) >> 32
        groups.append(
            [
                PlannedEpisode(task, member, state, number, seed, settings.max_steps, perturbation)
                for member in range(settings.group_size)
            ]
        )
    return groups


def episode_ids(step: int, planned: PlannedEpisode) -> tuple[str, str]:
    """Return two ids for a planned episode: the id of its group, and its own."""
    group = f"{step:05d}-{planned.repetition:06d}"
    return group, f"{group}-{planned.episode:04d}"


def refuse_groups(settings: RobotRolloutSettings, simulator: SimulatorSettings) -> None:
    """Refuse rollout settings early, before a training on demonstrations that precedes the rollouts.

    Raises:
        ConfigurationError: see `plan_step`, `refuse_unreachable` and `refuse_missing_shapes`.
    """
    begins = _begins(settings, suite_tasks(settings.suite))
    played = dict.fromkeys(task for task, *_ in begins)
    refuse_unreachable(played, simulator)
    refuse_missing_shapes(played, simulator)


def answer_seed(settings: RobotRolloutSettings, step: int, planned: PlannedEpisode, chunk: int) -> int:
    """Return the seed, in [0, 2**63), of everything random in chunk number `chunk` of an episode."""
    return _seed(settings.seed, "answer", step, planned.repetition, planned.episode, chunk)


def _begins(
    settings: RobotRolloutSettings, tasks: Sequence[LiberoTask]
) -> list[tuple[LiberoTask, int, Perturbation | None]]:
    """Return all starts of episodes according to the settings: task, initial state, and perturbation."""
    return [
        (task, state, perturbation)
        for task in tasks_of(settings.suite, tasks, settings.tasks, "rollouts.tasks")
        for state in states_of(task, settings.initial_states, "rollouts.initial_states")
        for perturbation in (None, *settings.perturbations.listed())
    ]


def _seed(*parts: object) -> int:
    return int.from_bytes(sha256(json.dumps(parts).encode()).digest()[:8], "big") >> 1
