"""Train a robot policy on demonstrations, of a dataset or recorded in LIBERO, and evaluate LIBERO's robot there."""

from __future__ import annotations

from prefect import flow

from armature.components.robots.recipes import TrainVla
from armature.tasks.flow_run import deployment_name, tracked_flow
from armature.tasks.parameters import takes
from armature.tasks.reports import CheckpointResult, promote_candidate, report
from armature.tasks.run_stage import run


@flow(name="train-vla", validate_parameters=True)
@takes(TrainVla)
def train_vla(recipe: TrainVla) -> list[str]:
    with tracked_flow(recipe) as tracking:
        recipe.refuse_ahead()
        data = run("demonstrations" if recipe.dataset is None else "dataset", recipe)
        recipe.refuse_other_robot(data)
        measured = run("quantile-stats", recipe, dataset=data)
        start = run("policy", recipe)
        trained = run("train-vla", recipe, policy=start, dataset=data, statistics=measured)
        made = {"data": data, "statistics": measured, "training": trained}
        after = trained
        if recipe.evaluation is not None:
            after = run("evaluate-libero", recipe, of="after training", policy=trained)
        findings = [CheckpointResult("after training", after)]
        if recipe.comparison is not None:
            before = run("evaluate-libero", recipe, of="before training", policy=start)
            made["comparison"] = run("compare-libero", recipe, first=before, second=after)
            findings.insert(0, CheckpointResult("before training", before))
        compared = findings if recipe.evaluation is not None else []
        candidate = promote_candidate(trained, f"train-vla.{deployment_name()}", compared)
        return report(tracking, findings, made, candidate)
