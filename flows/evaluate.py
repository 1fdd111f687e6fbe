"""Evaluate one checkpoint."""

from __future__ import annotations

from prefect import flow

from armature.components.recipes import Evaluate
from armature.tasks.checkpoints import checkpoint_artifact
from armature.tasks.flow_run import tracked_flow
from armature.tasks.parameters import takes
from armature.tasks.reports import CheckpointResult, report
from armature.tasks.run_stage import run


@flow(name="evaluate", validate_parameters=True)
@takes(Evaluate)
def evaluate(recipe: Evaluate) -> list[str]:
    sections, machine = recipe.given(), recipe.machine
    with tracked_flow(sections) as tracking:
        tasks = run("tasks", sections, machine)
        checkpoint = checkpoint_artifact(recipe.subject.checkpoint, recipe.model, machine)
        result = run("evaluate", sections, machine, tasks=tasks, model=checkpoint)
        return report(tracking, [CheckpointResult(recipe.subject.checkpoint, result)], {})
