"""Evaluate every checkpoint with every seed."""

from __future__ import annotations

from prefect import flow
from prefect.states import Failed, State

from components.contracts.machine import Machine
from components.environments.settings import EnvironmentSettings
from components.evaluation.settings import EvaluationSettings
from components.evaluation.subjects import SweepSettings
from components.inference.settings import ServerSettings
from components.models.settings import ModelSettings
from tasks.cells import run_cells
from tasks.flow_run import tracked_flow
from tasks.reports import report
from tasks.run_stage import run


@flow(name="evaluate", validate_parameters=True)
def sweep(
    sweep: SweepSettings,
    model: ModelSettings,
    environment: EnvironmentSettings,
    inference: ServerSettings,
    evaluation: EvaluationSettings,
    machine: Machine,
) -> list[str] | State[None]:
    """Evaluate checkpoints times seeds; a cell that fails takes no other with it.

    Args:
        sweep: The checkpoints and the seeds.
        model: How a checkpoint that is only a name is loaded.
        environment: What is played.
        inference: What the servers are told.
        evaluation: Which tasks, how often, and what counts as solved.
        machine: Facts of this machine; none changes the result.
    """
    sections = {
        "sweep": sweep,
        "model": model,
        "environment": environment,
        "inference": inference,
        "evaluation": evaluation,
        "machine": machine,
    }
    with tracked_flow(sections) as tracking:
        tasks = run("tasks", sections, machine)
        findings = run_cells(sweep, sections, machine, tasks)
        lines = report(tracking, findings, {})
    failed = [finding for finding in findings if finding.artifact is None]
    if failed:
        return Failed(message=f"{len(failed)}/{len(findings)} cells failed: {failed[0].name}: {failed[0].error}")
    return lines
