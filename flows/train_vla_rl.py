"""Train a robot policy with reinforcement learning in LIBERO, after imitation of demonstrations if the recipe has
it."""

from __future__ import annotations

from prefect import flow

from armature.components.robots.recipes import TrainVlaRl
from armature.tasks.flow_run import deployment_name, tracked_flow
from armature.tasks.parameters import takes
from armature.tasks.reports import CheckpointResult, promote_candidate, report
from armature.tasks.run_stage import run


@flow(name="train-vla-rl", validate_parameters=True)
@takes(TrainVlaRl)
def train_vla_rl(recipe: TrainVlaRl) -> list[str]:
    with tracked_flow(recipe) as tracking:
        recipe.refuse_ahead()
        start, made = run("policy", recipe), {}
        if recipe.training is not None:
            data = run("demonstrations", recipe)
            measured = run("quantile-stats", recipe, dataset=data)
            start = run("train-vla", recipe, policy=start, dataset=data, statistics=measured)
            made = {"data": data, "statistics": measured, "imitation": start}
        trained = run("train-vla-rl", recipe, policy=start)
        before = run("evaluate-libero", recipe, of="before training", policy=start)
        after = run("evaluate-libero", recipe, of="after training", policy=trained)
        compared = run("compare-libero", recipe, first=before, second=after)
        findings = [CheckpointResult("before training", before), CheckpointResult("after training", after)]
        candidate = promote_candidate(trained, f"train-vla-rl.{deployment_name()}", findings)
        return report(tracking, findings, {**made, "training": trained, "comparison": compared}, candidate)
