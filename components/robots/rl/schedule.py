"""Which episodes a step plays, and by which seeds."""

from __future__ import annotations

import json
from collections.abc import Sequence
from hashlib import sha256

import numpy as np

from armature.components.robots.evaluation.schedule import PlannedEpisode, states_of, tasks_of
from armature.components.robots.libero.settings import SimulatorSettings
from armature.components.robots.libero.tasks import LiberoTask, refuse_unreachable, suite_tasks
from armature.components.robots.rl.settings import RobotRolloutSettings


def plan_step(
    settings: RobotRolloutSettings, known: Sequence[LiberoTask], step: int, round_: int = 0
) -> list[list[PlannedEpisode]]:
    """The groups of a round of `step`. Every (task, initial state) comes once, in a shuffled order, before any repeats;
    rounds that are not played are left out of it.

    The episodes of a group differ in nothing but the noise of the policy: simulator_seed is the group's, `episode`
    counts within it, and `repetition` is the number of the group in the run.

    Args:
        step: 0 is the pre-flight's, of one group.

    Raises:
        ConfigurationError: the suite has no such task, or a task no such initial state.
    """
    begins = _begins(settings, known)
    count = settings.groups_per_step if step else 1
    first = ((step - 1) * settings.max_rounds + round_) * count if step else round_
    groups = []
    for number in range(first, first + count):
        lap, place = divmod(number, len(begins))
        order = np.random.default_rng((settings.seed, lap)).permutation(len(begins))
        task, state = begins[order[place]]
        seed = _seed(settings.seed, "simulator", step, number) >> 32
        groups.append(
            [
                PlannedEpisode(task, member, state, number, seed, settings.max_steps)
                for member in range(settings.group_size)
            ]
        )
    return groups


def episode_ids(step: int, planned: PlannedEpisode) -> tuple[str, str]:
    """Of an episode's group, and of the episode."""
    group = f"{step:05d}-{planned.repetition:06d}"
    return group, f"{group}-{planned.episode:04d}"


def refuse_groups(settings: RobotRolloutSettings, simulator: SimulatorSettings) -> None:
    """Refuse before a training on demonstrations what the rollouts after it would be refused for.

    Raises:
        ConfigurationError: as `plan_step` and `refuse_unreachable`.
    """
    begins = _begins(settings, suite_tasks(settings.suite))
    refuse_unreachable(dict.fromkeys(task for task, _ in begins), simulator)


def answer_seed(settings: RobotRolloutSettings, step: int, planned: PlannedEpisode, chunk: int) -> int:
    """Seed in [0, 2**63) of all that is random in the `chunk`-th answer of an episode."""
    return _seed(settings.seed, "answer", step, planned.repetition, planned.episode, chunk)


def _begins(settings: RobotRolloutSettings, known: Sequence[LiberoTask]) -> list[tuple[LiberoTask, int]]:
    return [
        (task, state)
        for task in tasks_of(settings.suite, known, settings.tasks, "rollouts.tasks")
        for state in states_of(task, settings.initial_states, "rollouts.initial_states")
    ]


def _seed(*parts: object) -> int:
    return int.from_bytes(sha256(json.dumps(parts).encode()).digest()[:8], "big") >> 1
