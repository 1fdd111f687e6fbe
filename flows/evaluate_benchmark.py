"""Evaluate one robot policy in a benchmark of vla-eval, or two on the same episodes."""

from __future__ import annotations

from prefect import flow

from armature.components.robots.recipes import EvaluateBenchmark
from armature.flows.evaluate_libero import policy_artifact
from armature.tasks.flow_run import tracked_flow
from armature.tasks.parameters import takes
from armature.tasks.reports import CheckpointResult, report
from armature.tasks.run_stage import run


@flow(name="evaluate", validate_parameters=True)
@takes(EvaluateBenchmark)
def evaluate_benchmark(recipe: EvaluateBenchmark) -> list[str]:
    with tracked_flow(recipe) as tracking:
        played = {
            place: run("evaluate-benchmark", recipe, of=place, policy=policy_artifact(policy, recipe.machine))
            for place, policy in recipe.policies().items()
        }
        made = {}
        if recipe.against is not None:
            made["comparison"] = run("compare-libero", recipe, first=played["against"], second=played["policy"])
        return report(tracking, [CheckpointResult(*each) for each in played.items()], made)
