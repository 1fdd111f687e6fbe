"""Compute the statistics of a robot dataset, with which a policy's states and actions are normalized."""

from __future__ import annotations

from prefect import flow

from armature.components.robots.datasets.source import local_folder
from armature.components.robots.datasets.stage import augment as put_into_dataset
from armature.components.robots.recipes import QuantileStats
from armature.tasks.flow_run import tracked_flow
from armature.tasks.parameters import takes
from armature.tasks.reports import report
from armature.tasks.run_stage import run


@flow(name="quantile-stats", validate_parameters=True)
@takes(QuantileStats)
def quantile_stats(recipe: QuantileStats) -> list[str]:
    with tracked_flow(recipe) as tracking:
        source = run("dataset", recipe)
        measured = run("quantile-stats", recipe, dataset=source)
        if recipe.augment.in_place:
            put_into_dataset(local_folder(recipe.dataset), measured.path)
        return report(tracking, [], {"dataset": source, "statistics": measured})
