"""Choose the tasks of a step. Tasks whose last group gave no training signal can be played less often."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from armature.components.artifacts.tables import TableSchema, read_table
from armature.components.contracts.episodes import Task
from armature.components.contracts.rollouts import GenerateOutputs, all_equal
from armature.components.rollouts.batches.advantages import groups_that_differ
from armature.components.rollouts.settings import RolloutSettings
from armature.components.rollouts.table import ROLLOUTS

# --- The order of tasks ---


def tasks_of_step(tasks: Sequence[Task], groups_per_step: int, step: int, seed: int, round: int = 0) -> list[Task]:
    """Return the tasks of round `round` of step `step` (both counted from 0), one per group.

    All steps together walk through one endless list of tasks. It has all tasks in a random order for epoch 0, then all
    tasks in another order for epoch 1, and so on. So no task repeats before all others have been played, and a resumed
    run needs only the number of its step. Each further round has a list of its own, so that a step's tasks do not
    depend on the rounds that earlier steps needed.
    """
    positions = np.arange(step * groups_per_step, (step + 1) * groups_per_step)
    orders = {
        int(epoch): task_order(len(tasks), seed, int(epoch), round) for epoch in np.unique(positions // len(tasks))
    }
    return [tasks[orders[position // len(tasks)][position % len(tasks)]] for position in positions.tolist()]


def task_order(count: int, seed: int, epoch: int, round: int) -> npt.NDArray[np.int64]:
    """Return the order of the tasks in epoch `epoch` of the list of round `round`: a permutation of the indices of
    `count` tasks, (count,) int64."""
    return np.random.default_rng((seed, epoch, round)).permutation(count)


# --- Difficulty of tasks: a group whose rollouts all get the same reward has nothing to learn from ---

DIFFICULTY = TableSchema(
    "task-difficulty",
    1,
    pa.schema(
        [
            ("task_id", pa.string()),
            ("groups", pa.int32()),  # with a finished rollout
            ("differing", pa.int32()),  # whose rewards differ
            ("all_right", pa.int32()),  # whose rewards are all the highest of the run
            ("all_wrong", pa.int32()),  # whose rewards are all one lower number
            ("last_step", pa.int32()),
            ("last_differed", pa.bool_()),
        ]
    ),
)


@dataclass(frozen=True)
class PlayedGroup:
    """Summary of a group's finished rollouts: its step, its task, and the lowest and highest reward."""

    step: int
    task_id: str
    lowest: float
    highest: float

    @property
    def differs(self) -> bool:
        """True if the group's rewards are not all equal."""
        return not all_equal((self.lowest, self.highest))


def played_groups(step: int, folder: Path) -> list[PlayedGroup]:
    """Read the rollouts of a step from `folder`, and return their groups with at least one finished rollout, ordered by
    group id.

    Raises:
        DataError: the table is missing or has another version.
    """
    names = ("group_id", "trajectory_id", "task_id", "reward")
    columns = read_table(folder / "rollouts.parquet", ROLLOUTS, columns=names).to_pydict()
    rewards: dict[tuple[str, str], dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for group, trajectory, task, reward in zip(*(columns[name] for name in names), strict=True):
        rewards[group, task][trajectory] += reward
    return [
        PlayedGroup(step, task, min(each.values()), max(each.values())) for (_, task), each in sorted(rewards.items())
    ]


@dataclass(frozen=True)
class TaskDifficulty:
    """Numbers of a task's groups by their rewards, and the outcome of its last group.

    Attributes:
        groups: number of groups with a finished rollout.
        differing: number of groups whose rewards differ.
        all_right: number of groups whose rewards are all the highest reward of the run.
        all_wrong: number of groups whose rewards are all the same lower reward.
        last_step: step of the task's last group.
        last_differed: True if the rewards of the last group differ.
    """

    task_id: str
    groups: int
    differing: int
    all_right: int
    all_wrong: int
    last_step: int
    last_differed: bool


def difficulty(groups: Iterable[PlayedGroup]) -> list[TaskDifficulty]:
    """Return the difficulty of each task that `groups` have played, sorted by task id."""
    by_task: dict[str, list[PlayedGroup]] = defaultdict(list)
    for group in groups:
        by_task[group.task_id].append(group)
    highest = max((group.highest for played in by_task.values() for group in played), default=0.0)
    return [_of_task(task_id, played, highest) for task_id, played in sorted(by_task.items())]


def _of_task(task_id: str, groups: Sequence[PlayedGroup], highest: float) -> TaskDifficulty:
    last = max(groups, key=lambda group: group.step)
    differing = sum(group.differs for group in groups)
    all_right = sum(not group.differs and all_equal((group.lowest, highest)) for group in groups)
    return TaskDifficulty(
        task_id, len(groups), differing, all_right, len(groups) - differing - all_right, last.step, last.differs
    )


def difficulty_counts(tasks: Sequence[TaskDifficulty]) -> dict[str, int]:
    """Return the number of played tasks, the number with a signal, that is, with a group whose rewards differ, and the
    numbers without a signal by outcome: always right, always wrong, or some groups right and others wrong."""
    silent = [task for task in tasks if not task.differing]
    return {
        "tasks/played": len(tasks),
        "tasks/with_signal": len(tasks) - len(silent),
        "tasks/always_right": sum(task.all_right == task.groups for task in silent),
        "tasks/always_wrong": sum(task.all_wrong == task.groups for task in silent),
        "tasks/right_or_wrong": sum(0 < task.all_right < task.groups for task in silent),
    }


Groups = Callable[[int], Iterable[PlayedGroup]]
"""A function that takes the number of a step and returns the groups that the step has played."""


class SignalSampler:
    """Choose the tasks of each step, from step 1 on. It walks through the endless lists of the function
    `tasks_of_step`, and skips some tasks that gave no training signal.

    A task whose last group had equal rewards is played with the probability `plan.repeat_no_signal`, drawn once per
    epoch. The tasks of step k depend only on the seed and the groups of earlier steps, so a sampler that reads the
    groups of a stored run continues exactly like that run.
    """

    def __init__(self, tasks: Sequence[Task], plan: RolloutSettings) -> None:
        self._tasks, self._plan = tasks, plan
        self._places = [plan.groups_per_step] * plan.max_rounds
        self._no_signal: set[str] = set()
        self._step, self._chosen = 0, list[list[Task]]()

    def tasks_of_step(self, step: int, played: Groups) -> list[list[Task]]:
        """Return one list of tasks for each round of `step`. Call it with increasing steps.

        Args:
            played: returns the groups of a step; called for every step from the last call's step to `step - 1`.
        """
        while self._step < step:
            if self._step:
                self._learn(played(self._step))
            self._step += 1
            self._chosen = [self._walk(number) for number in range(self._plan.max_rounds)]
        return self._chosen

    def _learn(self, groups: Iterable[PlayedGroup]) -> None:
        for group in groups:
            (self._no_signal.discard if group.differs else self._no_signal.add)(group.task_id)

    def _walk(self, number: int) -> list[Task]:
        """Return the next `groups_per_step` tasks of round `number`. Each round number has its own endless list of
        tasks, which this continues."""
        plan, count = self._plan, len(self._tasks)
        chosen: list[Task] = []
        while len(chosen) < plan.groups_per_step:
            epoch, start = divmod(self._places[number], count)
            order = task_order(count, plan.seed, epoch, number)
            draws = np.random.default_rng((plan.seed, epoch, number, 1)).random(count)
            for place in range(start, count):
                task = self._tasks[order[place]]
                self._places[number] += 1
                if task.task_id not in self._no_signal or draws[place] < plan.repeat_no_signal:
                    chosen.append(task)
                if len(chosen) == plan.groups_per_step:
                    break
        return chosen


# --- Dynamic sampling: play further tasks until enough groups have different rewards (DAPO, arXiv 2503.14476) ---


async def play_rounds(play: Callable[[int], Awaitable[GenerateOutputs]], plan: RolloutSettings) -> GenerateOutputs:
    """Play rounds until the rewards differ within enough groups, and return all rollouts. `play(number)` plays round
    `number`, counted from 0.

    Rounds are always completed, and only rewards decide if another round follows. So the speed of rollouts has no
    influence: equal rewards lead to equal tasks.
    """
    outputs = await play(0)
    for number in range(1, plan.max_rounds):
        if len(_differing(outputs)) >= plan.groups_per_step:
            break
        further = await play(number)
        outputs = GenerateOutputs(
            (*outputs.trajectories, *further.trajectories), (*outputs.failures, *further.failures)
        )
    return outputs


@dataclass(frozen=True)
class SelectedGroups:
    """The rollouts that a step trains on. `drops` counts the unused rollouts by reason. `metrics` has the numbers of
    rounds and groups."""

    outputs: GenerateOutputs
    drops: dict[str, int] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)


def choose_groups(outputs: GenerateOutputs, plan: RolloutSettings) -> SelectedGroups:
    """Return the first `groups_per_step` groups whose rewards differ, or all groups if `plan.max_rounds` is 1."""
    if plan.max_rounds == 1:
        return SelectedGroups(outputs)
    differing = _differing(outputs)
    chosen, surplus = set(differing[: plan.groups_per_step]), set(differing[plan.groups_per_step :])
    groups = {one.group_id for one in outputs.trajectories} | {one.group_id for one in outputs.failures}
    selected = tuple(one for one in outputs.trajectories if one.group_id in chosen)
    n_surplus = sum(one.group_id in surplus for one in outputs.trajectories)
    drops = {"surplus_group": n_surplus, "equal_rewards_group": len(outputs.trajectories) - len(selected) - n_surplus}
    metrics = {
        "groups/rounds": len(groups) / plan.groups_per_step,
        "groups/played": float(len(groups)),
        "groups/equal_rewards": float(len(groups) - len(differing)),
        "groups/surplus": float(len(surplus)),
    }
    return SelectedGroups(
        replace(outputs, trajectories=selected), {reason: count for reason, count in drops.items() if count}, metrics
    )


def _differing(outputs: GenerateOutputs) -> list[str]:
    return groups_that_differ((one.group_id, one.reward) for one in outputs.trajectories)
