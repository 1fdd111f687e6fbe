"""The statistics of a dataset: measured in units of some episodes, on threads or on workers, and merged."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple, dataclass
from functools import partial

import numpy as np

from armature.components.contracts.errors import ConfigurationError
from armature.components.contracts.machine import Machine
from armature.components.cpus import available_cpus
from armature.components.datasets import histograms, quantiles
from armature.components.datasets.histograms import Histogram
from armature.components.datasets.lerobot.reader import Dataset
from armature.components.datasets.lerobot.sampling import sampled
from armature.components.datasets.measured import MEASURED, Measured, episodes_table, merge
from armature.components.datasets.selection import selection
from armature.components.datasets.settings import QuantileStatsSettings
from armature.components.datasets.statistics import Array, FeatureStatistics
from armature.components.workers.pool import WorkerPool
from armature.components.workers.worker import Worker, make_worker

Finished = Callable[[tuple[int, Measured]], None]

NUMBERS_AT_ONCE, IMAGES_AT_ONCE = 1024, 8
"""Episodes of a unit, without and with images."""
UNIT_SECONDS, ATTEMPTS = 3600.0, 3
"""For a unit on a worker, and how many workers may be lost with it."""


@dataclass(frozen=True)
class MeasurementUnit:
    """Episodes `first` to `last`, in one data file."""

    first: int
    last: int
    numbers: tuple[str, ...]
    images: tuple[str, ...]
    all_images: bool


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
                f"feature {name!r} is {dataset.feature(name).dtype}, neither a number nor an image",
                code="feature_not_measurable",
            )
    images = tuple(name for name in chosen if dataset.feature(name).is_visual)
    numbers = tuple(name for name in chosen if name not in images)
    most = IMAGES_AT_ONCE if images else NUMBERS_AT_ONCE
    every = settings.images == "all"
    listed = selection(episodes).numbers()
    chunks, files = (dataset.episodes.numbers[name][listed] for name in ("chunk", "file"))
    parts = np.flatnonzero((np.diff(listed) != 1) | (np.diff(chunks) != 0) | (np.diff(files) != 0)) + 1
    return [
        MeasurementUnit(int(part[place]), int(part[place : place + most][-1]), numbers, images, every)
        for part in np.split(listed, parts)
        for place in range(0, len(part), most)
    ]


def measure_unit(unit: MeasurementUnit, dataset: Dataset) -> Measured:
    """
    Raises:
        DataError: a file is not what it should be, or a value is not finite.
    """
    found: dict[str, dict[str, Array]] = {}
    values, counted = {}, {}
    lengths = dataset.episodes.lengths(unit.first, unit.last)
    first, last = dataset.episodes[unit.first], dataset.episodes[unit.last]
    columns = dataset.columns([*unit.numbers, "timestamp"], first, last)
    starts = np.cumsum(lengths) - lengths
    timestamps = np.split(columns["timestamp"][:, 0], starts[1:])
    for name in unit.numbers:
        rows = columns[name]
        each, values[name] = quantiles.measure_columns(rows, lengths, name, unit.first)
        shape = dataset.feature(name).shape
        found[name] = {
            key: value if key == "count" else value.reshape(len(lengths), *shape) for key, value in each.items()
        }
    for name in unit.images:
        parts = []
        for episode, times in zip(dataset.episodes[unit.first : unit.last + 1], timestamps, strict=True):
            frames = range(episode.length) if unit.all_images else sampled(episode.length)
            histogram = Histogram.empty()
            for image in dataset.images(name, episode, frames, times):
                histogram = histogram.add(image)
            parts.append(histogram)
        arrays = [part.statistics().arrays() for part in parts]
        found[name] = {key: np.stack([each[key] for each in arrays]) for key in arrays[0]}
        counted[name] = histograms.merge(parts)
    return Measured(episodes_table(found), values, counted)


def measure_dataset(
    dataset: Dataset, units: Sequence[MeasurementUnit], machine: Machine, progress: Callable[[int], None]
) -> Measured:
    """All units, merged in their order: who computes them changes nothing. `progress` is told how many are done."""
    measured: dict[int, Measured] = {}

    def finished(result: tuple[int, Measured]) -> None:
        measured.update([result])
        progress(len(measured))

    run = _on_workers if machine.statistics_workers else _on_threads
    run(dataset, units, machine, finished)
    return merge([measured[number] for number in range(len(units))])


def overall(dataset: Dataset, measured: Measured, threads: int) -> dict[str, FeatureStatistics]:
    """Statistics of all frames, in the order of the dataset's features."""
    found = {name: each.statistics() for name, each in measured.histograms.items()}
    for name, values in measured.values.items():
        found[name] = values.statistics(threads).reshape(dataset.feature(name).shape)
    return {name: found[name] for name in dataset.info.features if name in found}


def cores(machine: Machine) -> int:
    return machine.threads or available_cpus()


def _on_threads(dataset: Dataset, units: Sequence[MeasurementUnit], machine: Machine, finished: Finished) -> None:
    with ThreadPoolExecutor(cores(machine), thread_name_prefix="statistics") as executor:
        try:
            for result in enumerate(executor.map(partial(measure_unit, dataset=dataset), units)):
                finished(result)
        finally:
            executor.shutdown(cancel_futures=True)


def _on_workers(dataset: Dataset, units: Sequence[MeasurementUnit], machine: Machine, finished: Finished) -> None:
    """Workers open the dataset by its name; a unit travels as its numbers, and units of a data file stay together."""
    opened = {"files": str(dataset.files), "quick_digest": dataset.files.quick_digest()}
    files = dataset.episodes.numbers[["chunk", "file"]]

    def measure(worker: Worker, job: tuple[int, MeasurementUnit]) -> tuple[int, Measured]:
        return job[0], worker.call("measure", *astuple(job[1]), reply=MEASURED)

    def start() -> Worker:
        return make_worker("armature.components.datasets.worker", opened, timeout=UNIT_SECONDS)

    with WorkerPool(start, machine.statistics_workers) as workers:
        workers.run(enumerate(units), measure, lambda job: files[job[1].first].item(), finished, ATTEMPTS)
