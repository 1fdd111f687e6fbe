"""Train a robot policy on demonstrations, from the simulator or of a dataset; LIBERO's robot is evaluated there."""

from __future__ import annotations

from prefect import flow

from armature.components.datasets.source import open_sources
from armature.components.evaluation.libero.robot import refuse_other_robot
from armature.components.evaluation.libero.schedule import refuse_episodes
from armature.components.recipes import TrainVla
from armature.tasks.flow_run import deployment_name, tracked_flow
from armature.tasks.parameters import takes
from armature.tasks.reports import CheckpointResult, promote_candidate, report
from armature.tasks.run_stage import run
from armature.tasks.training_data import training_data


@flow(name="train-vla", validate_parameters=True)
@takes(TrainVla)
def train_vla(recipe: TrainVla) -> list[str]:
    sections, machine = recipe.given(), recipe.machine
    with tracked_flow(sections) as tracking:
        if recipe.evaluation is not None and recipe.simulator is not None:
            refuse_episodes(recipe.evaluation, recipe.simulator)
        data = training_data(sections, machine)
        if recipe.dataset is not None and recipe.evaluation is not None and recipe.simulator is not None:
            refuse_other_robot(open_sources(data.path), recipe.policy.image_keys, recipe.simulator)
        measured = run("quantile-stats", sections, machine, dataset=data)
        start = run("policy", sections, machine)
        trained = run("train-vla", sections, machine, policy=start, dataset=data, statistics=measured)
        made = {"data": data, "statistics": measured, "training": trained}
        after = trained
        if recipe.evaluation is not None:
            after = run("evaluate-libero", sections, machine, of="after training", policy=trained)
        findings = [CheckpointResult("after training", after)]
        if recipe.comparison is not None:
            before = run("evaluate-libero", sections, machine, of="before training", policy=start)
            made["comparison"] = run("compare-libero", sections, machine, first=before, second=after)
            findings.insert(0, CheckpointResult("before training", before))
        compared = findings if recipe.evaluation is not None else []
        candidate = promote_candidate(trained, f"train-vla.{deployment_name()}", compared)
        return report(tracking, findings, made, candidate)
