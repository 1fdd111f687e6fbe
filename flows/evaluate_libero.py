"""Evaluate one robot policy in LIBERO, or two on the same episodes."""

from __future__ import annotations

from prefect import flow

from armature.components.contracts.machine import Machine
from armature.components.contracts.stages import Artifact
from armature.components.robots.policies.settings import RobotPolicySettings
from armature.components.robots.recipes import EvaluateLibero
from armature.tasks.checkpoints import ALIAS_PREFIX, aliased_artifact
from armature.tasks.flow_run import tracked_flow
from armature.tasks.parameters import takes
from armature.tasks.reports import CheckpointResult, report
from armature.tasks.run_stage import run, run_with


@flow(name="evaluate", validate_parameters=True)
@takes(EvaluateLibero)
def evaluate_libero(recipe: EvaluateLibero) -> list[str]:
    with tracked_flow(recipe) as tracking:
        played = run("evaluate-libero", recipe, of="policy", policy=policy_artifact(recipe.policy, recipe.machine))
        findings, made = [CheckpointResult("policy", played)], {}
        if recipe.against is not None:
            against = policy_artifact(recipe.against, recipe.machine)
            other = run("evaluate-libero", recipe, of="against", policy=against)
            findings.append(CheckpointResult("against", other))
            made["comparison"] = run("compare-libero", recipe, first=other, second=played)
        return report(tracking, findings, made)


def policy_artifact(policy: RobotPolicySettings, machine: Machine) -> Artifact:
    """Return the artifact of a policy.

    `checkpoint_path` may also be an MLflow alias such as `models:/train-vla.tiny@candidate`. The policy's settings then
    come from that checkpoint.

    Raises:
        DataError: MLflow does not know the alias, or its checkpoint is not on this machine.
    """
    released = policy.checkpoint_path or ""
    if policy.path is None and released.startswith(ALIAS_PREFIX):
        return aliased_artifact(released, machine)
    return run_with("policy", policy, machine)
