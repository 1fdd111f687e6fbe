"""Evaluate every checkpoint with every seed."""

from __future__ import annotations

from prefect import flow
from prefect.states import Failed, State

from armature.components.evaluation.subjects import Sweep
from armature.tasks.cells import run_cells
from armature.tasks.flow_run import tracked_flow
from armature.tasks.parameters import takes
from armature.tasks.reports import report
from armature.tasks.run_stage import run


@flow(name="evaluate", validate_parameters=True)
@takes(Sweep)
def sweep(recipe: Sweep) -> list[str] | State[None]:
    with tracked_flow(recipe) as tracking:
        tasks = run("tasks", recipe)
        findings = run_cells(recipe, tasks)
        lines = report(tracking, findings, {})
    failed = [finding for finding in findings if finding.artifact is None]
    if failed:
        return Failed(message=f"{len(failed)}/{len(findings)} cells failed: {failed[0].name}: {failed[0].error}")
    return lines
