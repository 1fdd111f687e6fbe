"""Evaluate one checkpoint."""

from __future__ import annotations

from prefect import flow

from components.recipes import Evaluate
from tasks.checkpoints import checkpoint_artifact
from tasks.flow_run import tracked_flow
from tasks.parameters import takes
from tasks.reports import CheckpointResult, report
from tasks.run_stage import run


@flow(name="evaluate", validate_parameters=True)
@takes(Evaluate)
def evaluate(recipe: Evaluate) -> list[str]:
    sections, machine = recipe.given(), recipe.machine
    with tracked_flow(sections) as tracking:
        tasks = run("tasks", sections, machine)
        checkpoint = checkpoint_artifact(recipe.subject.checkpoint, recipe.model, machine)
        result = run("evaluate", sections, machine, tasks=tasks, model=checkpoint)
        return report(tracking, [CheckpointResult(recipe.subject.checkpoint, result)], {})
