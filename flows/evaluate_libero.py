"""Evaluate one robot policy in LIBERO, or two on the same episodes."""

from __future__ import annotations

from prefect import flow

from armature.components.recipes import EvaluateLibero
from armature.tasks.checkpoints import policy_artifact
from armature.tasks.flow_run import tracked_flow
from armature.tasks.parameters import takes
from armature.tasks.reports import CheckpointResult, report
from armature.tasks.run_stage import run


@flow(name="evaluate", validate_parameters=True)
@takes(EvaluateLibero)
def evaluate_libero(recipe: EvaluateLibero) -> list[str]:
    sections, machine = recipe.given(), recipe.machine
    with tracked_flow(sections) as tracking:
        played = run("evaluate-libero", sections, machine, of="policy", policy=policy_artifact(recipe.policy, machine))
        findings, made = [CheckpointResult("policy", played)], {}
        if recipe.against is not None:
            against = policy_artifact(recipe.against, machine)
            other = run("evaluate-libero", sections, machine, of="against", policy=against)
            findings.append(CheckpointResult("against", other))
            made["comparison"] = run("compare-libero", sections, machine, first=other, second=played)
        return report(tracking, findings, made)
