"""Train a robot policy on demonstrations, from the simulator or of a dataset, to an evaluation in LIBERO."""

from __future__ import annotations

from prefect import flow

from components.recipes import TrainVla
from tasks.flow_run import deployment_name, tracked_flow
from tasks.parameters import takes
from tasks.reports import CheckpointResult, promote_candidate, report
from tasks.run_stage import run
from tasks.training_data import training_data


@flow(name="train-vla", validate_parameters=True)
@takes(TrainVla)
def train_vla(recipe: TrainVla) -> list[str]:
    sections, machine = recipe.given(), recipe.machine
    with tracked_flow(sections) as tracking:
        data = training_data(sections, machine)
        measured = run("quantile-stats", sections, machine, dataset=data)
        start = run("policy", sections, machine)
        trained = run("train-vla", sections, machine, policy=start, dataset=data, statistics=measured)
        after = run("evaluate-libero", sections, machine, policy=trained)
        findings, made = (
            [CheckpointResult("after training", after)],
            {"data": data, "statistics": measured, "training": trained},
        )
        if recipe.comparison is not None:
            before = run("evaluate-libero", sections, machine, policy=start)
            made["comparison"] = run("compare-libero", sections, machine, first=before, second=after)
            findings.insert(0, CheckpointResult("before training", before))
        candidate = promote_candidate(trained, f"train-vla.{deployment_name()}")
        return report(tracking, findings, made, candidate)
