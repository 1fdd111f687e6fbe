"""Which tasks a step plays, where tasks that lately gave no signal are played less often."""

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

# Which tasks a step plays.


def tasks_of_step(tasks: Sequence[Task], groups_per_step: int, step: int, seed: int, round: int = 0) -> list[Task]:
    """The tasks of round `round` of step `step` (both from 0), one per group.

    All steps together walk through one endless list: the tasks in an order drawn for epoch 0, then in one drawn
    for epoch 1, and so on. So no task comes again before all others have come, and a resumed run needs to
    know nothing but its step. Further rounds walk through lists of their own, so that what a step plays does not
    depend on how many rounds the steps before it needed.
    """
    positions = np.arange(step * groups_per_step, (step + 1) * groups_per_step)
    orders = {
        int(epoch): task_order(len(tasks), seed, int(epoch), round) for epoch in np.unique(positions // len(tasks))
    }
    return [tasks[orders[position // len(tasks)][position % len(tasks)]] for position in positions.tolist()]


def task_order(count: int, seed: int, epoch: int, round: int) -> npt.NDArray[np.int64]:
    """(count,) int64: the order of the tasks in an epoch of a round's list."""
    return np.random.default_rng((seed, epoch, round)).permutation(count)


# Which tasks tell a group's rollouts apart: where all of them earn the same, there is nothing to learn from.

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
    """The finished rollouts of one group in short."""

    step: int
    task_id: str
    lowest: float
    highest: float

    @property
    def differs(self) -> bool:
        return not all_equal((self.lowest, self.highest))


def played_groups(step: int, folder: Path) -> list[PlayedGroup]:
    """The groups in the rollouts of a step, in the order of the plan; those without a finished rollout are not there.

    Raises:
        DataError: the table is missing, or is one of another version.
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
    """How the groups of a task ended; see `DIFFICULTY`."""

    task_id: str
    groups: int
    differing: int
    all_right: int
    all_wrong: int
    last_step: int
    last_differed: bool


def difficulty(groups: Iterable[PlayedGroup]) -> list[TaskDifficulty]:
    """By task, in the order of their names."""
    by_task: dict[str, list[PlayedGroup]] = defaultdict(list)
    for group in groups:
        by_task[group.task_id].append(group)
    highest = max((group.highest for own in by_task.values() for group in own), default=0.0)
    return [_of_task(task_id, own, highest) for task_id, own in sorted(by_task.items())]


def _of_task(task_id: str, groups: Sequence[PlayedGroup], highest: float) -> TaskDifficulty:
    last = max(groups, key=lambda group: group.step)
    differing = sum(group.differs for group in groups)
    all_right = sum(not group.differs and all_equal((group.lowest, highest)) for group in groups)
    return TaskDifficulty(
        task_id, len(groups), differing, all_right, len(groups) - differing - all_right, last.step, last.differs
    )


def difficulty_counts(tasks: Sequence[TaskDifficulty]) -> dict[str, int]:
    """How many tasks were played, and of how many no group ever told its rollouts apart."""
    silent = [task for task in tasks if not task.differing]
    return {
        "tasks/played": len(tasks),
        "tasks/with_signal": len(tasks) - len(silent),
        "tasks/always_right": sum(task.all_right == task.groups for task in silent),
        "tasks/always_wrong": sum(task.all_wrong == task.groups for task in silent),
        "tasks/right_or_wrong": sum(0 < task.all_right < task.groups for task in silent),
    }


Groups = Callable[[int], Iterable[PlayedGroup]]
"""The groups that a step has played."""


class SignalSampler:
    """Walks through the lists of `tasks_of_step`, from step 1, and leaves tasks out.

    A task whose last group had equal rewards is taken with the probability `plan.repeat_no_signal`, drawn for each
    epoch. What step k plays follows from the seed and from the groups of the steps before it, so a sampler that
    starts with those of a stored run continues as the one of that run would have.
    """

    def __init__(self, tasks: Sequence[Task], plan: RolloutSettings) -> None:
        self._tasks, self._plan = tasks, plan
        self._places = [plan.groups_per_step] * plan.max_rounds
        self._no_signal: set[str] = set()
        self._step, self._chosen = 0, list[list[Task]]()

    def tasks_of_step(self, step: int, played: Groups) -> list[list[Task]]:
        """The tasks of each round of `step`; steps are asked for in their order.

        Args:
            played: gives the groups of the steps from that of the last call to the one before `step`.
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
        """The next tasks of the list of round `number`."""
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


# Dynamic sampling: further tasks are played until enough groups tell good from bad (DAPO, arXiv 2503.14476).


async def play_rounds(play: Callable[[int], Awaitable[GenerateOutputs]], plan: RolloutSettings) -> GenerateOutputs:
    """Everything that was played, round after round, `play(number)` being round `number` from 0.

    A round is played whole, and whether another follows depends on the rewards alone: however fast each rollout
    was, the same rewards lead to the same tasks.
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
    """The rollouts that a step trains on. `drops` counts the other rollouts by reason; `metrics` counts groups."""

    outputs: GenerateOutputs
    drops: dict[str, int] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)


def choose_groups(outputs: GenerateOutputs, plan: RolloutSettings) -> SelectedGroups:
    """The first `groups_per_step` groups whose rewards differ; all groups where only one round may be played."""
    if plan.max_rounds == 1:
        return SelectedGroups(outputs)
    differing = _differing(outputs)
    chosen, surplus = set(differing[: plan.groups_per_step]), set(differing[plan.groups_per_step :])
    groups = {one.group_id for one in outputs.trajectories} | {one.group_id for one in outputs.failures}
    kept = tuple(one for one in outputs.trajectories if one.group_id in chosen)
    n_surplus = sum(one.group_id in surplus for one in outputs.trajectories)
    drops = {"surplus_group": n_surplus, "equal_rewards_group": len(outputs.trajectories) - len(kept) - n_surplus}
    metrics = {
        "groups/rounds": len(groups) / plan.groups_per_step,
        "groups/played": float(len(groups)),
        "groups/equal_rewards": float(len(groups) - len(differing)),
        "groups/surplus": float(len(surplus)),
    }
    found = {reason: count for reason, count in drops.items() if count}
    return SelectedGroups(replace(outputs, trajectories=kept), found, metrics)


def _differing(outputs: GenerateOutputs) -> list[str]:
    return groups_that_differ((one.group_id, one.reward) for one in outputs.trajectories)
