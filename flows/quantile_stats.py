"""Statistics of a robot dataset, by which a policy's inputs and actions are scaled."""

from __future__ import annotations

from prefect import flow

from components.contracts.machine import Machine
from components.datasets.settings import AugmentSettings, DatasetSettings, QuantileStatsSettings
from components.datasets.source import local_folder, pinned
from components.datasets.stage import augment as put_into_dataset
from tasks.flow_run import tracked_flow
from tasks.reports import report
from tasks.run_stage import run


@flow(name="quantile-stats", validate_parameters=True)
def quantile_stats(
    dataset: DatasetSettings, statistics: QuantileStatsSettings, augment: AugmentSettings, machine: Machine
) -> list[str]:
    """Minimum, maximum, mean, std and quantiles of every feature, of each episode and of all.

    Args:
        dataset: The dataset, or several. What is there now is what is measured.
        statistics: Which features, and which frames of pictures.
        augment: Whether the dataset gets them.
        machine: Facts of this machine; none changes the result.
    """
    sections = {"dataset": pinned(dataset), "statistics": statistics, "augment": augment, "machine": machine}
    with tracked_flow(sections) as tracking:
        source = run("dataset", sections, machine)
        measured = run("quantile-stats", sections, machine, dataset=source)
        if augment.in_place:
            put_into_dataset(local_folder(dataset), measured.path)
        return report(tracking, [], {"dataset": source, "statistics": measured})
