"""Which tasks tell a group's rollouts apart: where all of them earn the same, there is nothing to learn from."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from armature.components.artifacts.tables import TableSchema, read_table
from armature.components.contracts.rollouts import all_equal
from armature.components.rollouts.table import ROLLOUTS

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
