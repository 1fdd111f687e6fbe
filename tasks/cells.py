"""The cells of a sweep: each a task of its own, so that each has its own log, state and retry."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product

from prefect import task
from prefect.cache_policies import NO_CACHE
from pydantic import BaseModel

from armature.components.contracts.machine import Machine
from armature.components.contracts.stages import Artifact
from armature.components.evaluation.settings import EvaluationSettings
from armature.components.evaluation.subjects import SweepSettings
from armature.components.models.settings import ModelSettings
from armature.tasks.checkpoints import checkpoint_artifact
from armature.tasks.reports import CheckpointResult
from armature.tasks.run_stage import run


@task(name="cell", task_run_name="{checkpoint}-seed{seed}", cache_policy=NO_CACHE, persist_result=False)
def cell(checkpoint: str, seed: int, sections: Mapping[str, BaseModel], machine: Machine, tasks: Artifact) -> Artifact:
    """One checkpoint evaluated with one seed."""
    model, evaluation = sections["model"], sections["evaluation"]
    assert isinstance(model, ModelSettings) and isinstance(evaluation, EvaluationSettings)
    artifact = checkpoint_artifact(checkpoint, model, machine)
    seeded = {**sections, "evaluation": evaluation.model_copy(update={"seed": seed})}
    return run("evaluate", seeded, machine, of=f"{checkpoint}-seed{seed}", tasks=tasks, model=artifact)


def run_cells(
    sweep: SweepSettings, sections: Mapping[str, BaseModel], machine: Machine, tasks: Artifact
) -> list[CheckpointResult]:
    """Every cell in turn (each takes the machine's servers for itself); a failed one is a finding too."""
    findings = []
    for checkpoint, seed in product(dict.fromkeys(sweep.checkpoints), dict.fromkeys(sweep.seeds)):
        name = f"{checkpoint}-seed{seed}"
        state = cell(checkpoint, seed, sections, machine, tasks, return_state=True)
        done = state.is_completed()
        findings.append(CheckpointResult(name, state.result() if done else None, "" if done else str(state.message)))
    return findings
