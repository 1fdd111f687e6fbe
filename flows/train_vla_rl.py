"""Train a robot policy by rewards in LIBERO, on demonstrations first where the recipe says so."""

from __future__ import annotations

from prefect import flow

from armature.components.evaluation.libero.schedule import refuse_episodes
from armature.components.recipes import TrainVlaRl
from armature.components.vla_rl.schedule import refuse_groups
from armature.tasks.flow_run import deployment_name, tracked_flow
from armature.tasks.parameters import takes
from armature.tasks.reports import CheckpointResult, promote_candidate, report
from armature.tasks.run_stage import run


@flow(name="train-vla-rl", validate_parameters=True)
@takes(TrainVlaRl)
def train_vla_rl(recipe: TrainVlaRl) -> list[str]:
    sections, machine = recipe.given(), recipe.machine
    with tracked_flow(sections) as tracking:
        refuse_groups(recipe.rollouts, recipe.simulator)
        refuse_episodes(recipe.evaluation, recipe.simulator)
        start, made = run("policy", sections, machine), {}
        if recipe.training is not None:
            data = run("demonstrations", sections, machine)
            measured = run("quantile-stats", sections, machine, dataset=data)
            start = run("train-vla", sections, machine, policy=start, dataset=data, statistics=measured)
            made = {"data": data, "statistics": measured, "imitation": start}
        trained = run("train-vla-rl", sections, machine, policy=start)
        before = run("evaluate-libero", sections, machine, of="before training", policy=start)
        after = run("evaluate-libero", sections, machine, of="after training", policy=trained)
        compared = run("compare-libero", sections, machine, first=before, second=after)
        findings = [CheckpointResult("before training", before), CheckpointResult("after training", after)]
        candidate = promote_candidate(trained, f"train-vla-rl.{deployment_name()}", findings)
        return report(tracking, findings, {**made, "training": trained, "comparison": compared}, candidate)
