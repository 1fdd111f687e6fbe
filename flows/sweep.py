"""Evaluate every checkpoint with every seed. Each pair is a task run with its own log, state and retry."""

from __future__ import annotations

from itertools import product

from prefect import flow, task
from prefect.cache_policies import NO_CACHE
from prefect.states import Failed, State

from armature.components.configuration import sections_of
from armature.components.contracts.stages import Artifact
from armature.components.evaluation.settings import Sweep
from armature.tasks.checkpoints import checkpoint_artifact
from armature.tasks.flow_run import tracked_flow
from armature.tasks.parameters import takes
from armature.tasks.reports import CheckpointResult, report
from armature.tasks.run_stage import run


@task(name="cell", task_run_name="{checkpoint}-seed{seed}", cache_policy=NO_CACHE, persist_result=False)
def cell(checkpoint: str, seed: int, recipe: Sweep, tasks: Artifact) -> Artifact:
    """Evaluate one checkpoint with one seed."""
    artifact = checkpoint_artifact(checkpoint, recipe.model, recipe.machine)
    evaluation = recipe.evaluation.model_copy(update={"seed": seed})
    seeded = sections_of(Sweep, {**recipe.given(), "evaluation": evaluation})
    return run("evaluate", seeded, of=f"{checkpoint}-seed{seed}", tasks=tasks, model=artifact)


def run_cells(recipe: Sweep, tasks: Artifact) -> list[CheckpointResult]:
    """Evaluate each checkpoint with each seed, and return one result for each pair, also if its evaluation failed.

    The evaluations run one after the other, because each uses all servers of the machine.
    """
    findings, sweep = [], recipe.sweep
    for checkpoint, seed in product(dict.fromkeys(sweep.checkpoints), dict.fromkeys(sweep.seeds)):
        name = f"{checkpoint}-seed{seed}"
        findings.append(CheckpointResult.of(name, cell(checkpoint, seed, recipe, tasks, return_state=True)))
    return findings


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
