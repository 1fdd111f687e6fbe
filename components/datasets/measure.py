"""The statistics of a dataset: measured in units of some episodes, on threads or on Dask, and merged."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from components.contracts.errors import ConfigurationError, DataError
from components.contracts.machine import Machine
from components.cpus import available_cpus
from components.datasets import histograms, quantiles
from components.datasets.histograms import Histogram
from components.datasets.lerobot.episodes import EpisodeRange
from components.datasets.lerobot.reader import Dataset
from components.datasets.lerobot.sampling import sampled
from components.datasets.quantiles import FeatureValues
from components.datasets.settings import QuantileStatsSettings
from components.datasets.statistics import FeatureStatistics
from components.installation import install_command

NUMBERS_AT_ONCE, IMAGES_AT_ONCE = 1024, 8
"""Episodes of a unit, without and with images."""


@dataclass(frozen=True)
class MeasurementUnit:
    """Episodes `first` to `last`, in one data file."""

    first: int
    last: int
    numbers: tuple[str, ...]
    images: tuple[str, ...]
    all_images: bool


@dataclass(frozen=True)
class Measured:
    """Statistics of each episode, in order, and what those of all merge from."""

    episodes: Sequence[dict[str, FeatureStatistics]]
    values: dict[str, FeatureValues]
    histograms: dict[str, Histogram]


def plan(dataset: Dataset, settings: QuantileStatsSettings, episodes: Sequence[int]) -> list[MeasurementUnit]:
    """The units of these episodes (ascending), the same on every machine.

    Raises:
        ConfigurationError: a feature is unknown, or neither a number nor an image.
    """
    chosen = settings.features or tuple(
        name for name, feature in dataset.info.features.items() if feature.is_number or feature.is_visual
    )
    for name in chosen:
        if not (dataset.feature(name).is_number or dataset.feature(name).is_visual):
            raise ConfigurationError(
                f"feature {name!r} is {dataset.feature(name).dtype}, neither a number nor an image"
            )
    images = tuple(name for name in chosen if dataset.feature(name).is_visual)
    numbers = tuple(name for name in chosen if name not in images)
    most = IMAGES_AT_ONCE if images else NUMBERS_AT_ONCE
    groups: list[list[EpisodeRange]] = []
    for episode in (dataset.episodes[index] for index in episodes):
        before = groups[-1] if groups else []
        follows = bool(before) and before[-1].index + 1 == episode.index
        if follows and len(before) < most and (before[0].chunk, before[0].file) == (episode.chunk, episode.file):
            before.append(episode)
        else:
            groups.append([episode])
    every = settings.images == "all"
    return [MeasurementUnit(group[0].index, group[-1].index, numbers, images, every) for group in groups]


def measure_unit(unit: MeasurementUnit, dataset: Dataset) -> Measured:
    """
    Raises:
        DataError: a file is not what it should be, or a value is not finite.
    """
    episodes = dataset.episodes[unit.first : unit.last + 1]
    found: list[dict[str, FeatureStatistics]] = [{} for _ in episodes]
    values, counted = {}, {}
    columns = dataset.columns(unit.numbers, episodes[0], episodes[-1]) if unit.numbers else {}
    for name, rows in columns.items():
        each, values[name] = quantiles.measure(rows, [episode.length for episode in episodes], name, unit.first)
        for place, statistics in zip(found, each, strict=True):
            place[name] = statistics.reshape(dataset.feature(name).shape)
    for name in unit.images:
        parts = []
        for place, episode in zip(found, episodes, strict=True):
            frames = range(episode.length) if unit.all_images else sampled(episode.length)
            histogram = Histogram.empty()
            for image in dataset.images(name, episode, frames):
                histogram = histogram.add(image)
            place[name] = histogram.statistics()
            parts.append(histogram)
        counted[name] = histograms.merge(parts)
    return Measured(found, values, counted)


def measure_dataset(
    dataset: Dataset, units: Sequence[MeasurementUnit], machine: Machine, progress: Callable[[int], None]
) -> Measured:
    """All units, merged in their order: who computes them changes nothing. `progress` is told how many are done."""
    measured: list[Measured] = []
    with runner(machine) as run:
        for each in run(partial(measure_unit, dataset=dataset), units):
            measured.append(each)
            progress(len(measured))
    return merge(measured)


def merge(parts: Sequence[Measured]) -> Measured:
    """All of what was measured, as one: the features that all parts have.

    Raises:
        DataError: a feature has another width in another part, or they have none in common.
    """
    values = [name for name in parts[0].values if all(name in part.values for part in parts)]
    images = [name for name in parts[0].histograms if all(name in part.histograms for part in parts)]
    if not values and not images:
        raise DataError(
            "they have no feature in common", where="datasets of the same tag", remedy="give them different tags"
        )
    for name in values:
        if len(widths := {len(part.values[name].mean) for part in parts}) > 1:
            raise DataError(
                f"feature {name!r} has {sorted(widths)} values a frame",
                where="datasets of the same tag",
                remedy="give datasets of different robots different tags",
            )
    return Measured(
        [each for part in parts for each in part.episodes],
        {name: quantiles.merge([part.values[name] for part in parts]) for name in values},
        {name: histograms.merge([part.histograms[name] for part in parts]) for name in images},
    )


def overall(dataset: Dataset, measured: Measured, threads: int) -> dict[str, FeatureStatistics]:
    """Statistics of all frames, in the order of the dataset's features."""
    found = {name: each.statistics() for name, each in measured.histograms.items()}
    for name, values in measured.values.items():
        found[name] = values.statistics(threads).reshape(dataset.feature(name).shape)
    return {name: found[name] for name in dataset.info.features if name in found}


def cores(machine: Machine) -> int:
    return machine.threads or available_cpus()


@contextmanager
def runner(machine: Machine) -> Iterator[Callable[..., Iterator[Any]]]:
    """Maps a function over units, results in order.

    Raises:
        ConfigurationError: Dask is asked for and not installed.
    """
    if machine.task_runner == "threads":
        with ThreadPoolExecutor(cores(machine), thread_name_prefix="statistics") as executor:
            try:
                yield executor.map
            finally:
                executor.shutdown(cancel_futures=True)
        return
    try:
        from distributed import Client, LocalCluster
    except ImportError as error:
        raise ConfigurationError("task_runner is dask", remedy=install_command("dask")) from error
    with ExitStack() as stack:
        where = machine.dask_scheduler or stack.enter_context(
            LocalCluster(n_workers=cores(machine), threads_per_worker=1, dashboard_address=None)
        )
        client = stack.enter_context(Client(where))
        yield lambda work, units: (future.result() for future in client.map(work, units, pure=False))
