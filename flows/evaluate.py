"""Evaluate one checkpoint."""

from __future__ import annotations

from prefect import flow

from armature.components.evaluation.settings import Evaluate
from armature.tasks.checkpoints import checkpoint_artifact
from armature.tasks.flow_run import tracked_flow
from armature.tasks.parameters import takes
from armature.tasks.reports import CheckpointResult, report
from armature.tasks.run_stage import run


@flow(name="evaluate", validate_parameters=True)
@takes(Evaluate)
def evaluate(recipe: Evaluate) -> list[str]:
    with tracked_flow(recipe) as tracking:
        tasks = run("tasks", recipe)
        checkpoint = checkpoint_artifact(recipe.subject.checkpoint, recipe.model, recipe.machine)
        result = run("evaluate", recipe, tasks=tasks, model=checkpoint)
        return report(tracking, [CheckpointResult(recipe.subject.checkpoint, result)], {})
