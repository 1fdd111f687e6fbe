"""The tasks of an evaluation."""

from __future__ import annotations

from pathlib import Path

from armature.components.contracts.episodes import Task
from armature.components.environments.stage import load_tasks
from armature.components.evaluation.results import task_kind
from armature.components.evaluation.settings import EvaluationSettings


def planned_tasks(plan: EvaluationSettings, folder: Path) -> list[Task]:
    """Those of every split in the tasks artifact at `folder`, in the order of the splits.

    Raises:
        ConfigurationError: one of them has no field `plan.kind_field`.
        DataError: the artifact cannot be read.
    """
    tasks = [task for split in plan.splits for task in load_tasks(folder, split)[: plan.max_tasks or None]]
    for task in tasks:
        task_kind(task, plan.kind_field)
    return tasks
