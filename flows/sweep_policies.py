"""Evaluate several robot policies on the same episodes of LIBERO, and compare each pair."""

from __future__ import annotations

from prefect import flow, task
from prefect.cache_policies import NO_CACHE
from prefect.states import Failed, State

from armature.components.contracts.stages import Artifact
from armature.components.robots.evaluation.sweep import ComparePoliciesSettings
from armature.components.robots.recipes import SweepPolicies
from armature.flows.evaluate_libero import policy_artifact
from armature.tasks.flow_run import tracked_flow
from armature.tasks.parameters import takes
from armature.tasks.reports import CheckpointResult, report
from armature.tasks.run_stage import run, run_with


@task(name="policy", task_run_name="{name}", cache_policy=NO_CACHE, persist_result=False)
def played(name: str, recipe: SweepPolicies) -> Artifact:
    """Evaluate one policy."""
    policy = policy_artifact(recipe.sweep.policies[name], recipe.machine)
    return run("evaluate-libero", recipe, of=name, policy=policy)


@flow(name="evaluate", validate_parameters=True)
@takes(SweepPolicies)
def sweep_policies(recipe: SweepPolicies) -> list[str] | State[None]:
    with tracked_flow(recipe) as tracking:
        names = recipe.sweep.policies
        findings = [CheckpointResult.of(name, played(name, recipe, return_state=True)) for name in names]
        evaluations = {finding.name: finding.artifact for finding in findings if finding.artifact}
        made = {}
        if len(evaluations) > 1:
            chosen = ComparePoliciesSettings(policies=tuple(evaluations), confidence=recipe.comparison.confidence)
            # No policy has this name, which has a space.
            made["all pairs"] = run_with("compare-policies", chosen, recipe.machine, "", **evaluations)
        lines = report(tracking, findings, made)
    failed = [finding for finding in findings if finding.artifact is None]
    if failed:
        return Failed(message=f"{len(failed)}/{len(findings)} policies failed: {failed[0].name}: {failed[0].error}")
    return lines
