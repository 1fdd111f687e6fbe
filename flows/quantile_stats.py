"""Statistics of a robot dataset, by which a policy's inputs and actions are scaled."""

from __future__ import annotations

from prefect import flow

from components.datasets.source import local_folder
from components.datasets.stage import augment as put_into_dataset
from components.recipes import QuantileStats
from tasks.flow_run import tracked_flow
from tasks.parameters import takes
from tasks.reports import report
from tasks.run_stage import run


@flow(name="quantile-stats", validate_parameters=True)
@takes(QuantileStats)
def quantile_stats(recipe: QuantileStats) -> list[str]:
    sections, machine = recipe.given(), recipe.machine
    with tracked_flow(sections) as tracking:
        source = run("dataset", sections, machine)
        measured = run("quantile-stats", sections, machine, dataset=source)
        if recipe.augment.in_place:
            put_into_dataset(local_folder(recipe.dataset), measured.path)
        return report(tracking, [], {"dataset": source, "statistics": measured})
