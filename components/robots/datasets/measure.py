"""Measuring a dataset's statistics: units of a few episodes on threads or worker processes, then merged."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple, dataclass
from functools import partial
from typing import Annotated, Any

import numpy as np
import pyarrow as pa
from pydantic import NonNegativeInt, PlainValidator, TypeAdapter

from armature.components.contracts.errors import ConfigurationError, DataError
from armature.components.contracts.machine import Machine, available_cpus
from armature.components.machine.workers.pool import WorkerPool
from armature.components.machine.workers.requests import ReplyForm, array_of
from armature.components.machine.workers.worker import Worker, make_worker
from armature.components.robots.datasets import histograms, quantiles
from armature.components.robots.datasets.histograms import Histogram
from armature.components.robots.datasets.lerobot.columns import sampled
from armature.components.robots.datasets.lerobot.reader import Dataset
from armature.components.robots.datasets.quantiles import Array, FeatureStatistics, FeatureValues
from armature.components.robots.datasets.settings import QuantileStatsSettings
from armature.components.robots.datasets.source import selection

# --- Measurements of some episodes, which can be merged and sent between processes ---


@dataclass(frozen=True)
class Measured:
    """Statistics of each episode in order, and the data that statistics of all episodes are merged from.

    `episodes` has one row per episode, with columns named as in a dataset's meta/episodes:
    `stats/<feature>/<statistic>`.
    """

    episodes: pa.Table
    values: dict[str, FeatureValues]
    histograms: dict[str, Histogram]


def episodes_table(statistics: Mapping[str, Mapping[str, Array]]) -> pa.Table:
    """Return a table with one row per episode and a column `stats/<feature>/<statistic>` for each array.

    statistics: arrays (episodes, *shape) by feature and name of the statistic.
    """
    return pa.table({f"stats/{name}/{key}": _lists(each[key]) for name, each in statistics.items() for key in each})


def merge(parts: Sequence[Measured]) -> Measured:
    """Merge the measurements of several datasets or units. Only features that all parts have are kept.

    Raises:
        DataError: parts have different widths of a feature, or no feature in common.
    """
    values = [name for name in parts[0].values if all(name in part.values for part in parts)]
    images = [name for name in parts[0].histograms if all(name in part.histograms for part in parts)]
    if not values and not images:
        raise DataError(
            "the datasets have no feature in common",
            code="no_common_feature",
            where="datasets of the same tag",
            remedy="give them different tags",
        )
    for name in values:
        if len(widths := {len(part.values[name].mean) for part in parts}) > 1:
            raise DataError(
                f"feature {name!r} has {sorted(widths)} values per frame",
                code="feature_widths_differ",
                where="datasets of the same tag",
                remedy="use different tags for datasets of different robots",
            )
    episodes = pa.concat_tables([part.episodes for part in parts], promote_options="default")
    return Measured(
        episodes.select(parts[0].episodes.column_names),
        {name: quantiles.merge([part.values[name] for part in parts]) for name in values},
        {name: histograms.merge([part.histograms[name] for part in parts]) for name in images},
    )


def as_data(measured: Measured) -> dict[str, Any]:
    """Return the measurements as JSON values and arrays, to be sent to another process."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, measured.episodes.schema) as writer:
        writer.write_table(measured.episodes)
    return {
        "episodes": np.frombuffer(sink.getvalue(), np.uint8),
        "values": {name: vars(each) for name, each in measured.values.items()},
        "histograms": {name: vars(each) for name, each in measured.histograms.items()},
    }


class ValuesReply(ReplyForm):
    """Reply with the fields of a `FeatureValues`."""

    parts: list[np.ndarray]
    count: NonNegativeInt
    mean: Annotated[Array, PlainValidator(array_of(np.float64, 1))]
    squares: Annotated[Array, PlainValidator(array_of(np.float64, 1))]


class HistogramReply(ReplyForm):
    """Reply with the fields of a `Histogram`."""

    counts: Annotated[Array, PlainValidator(array_of(np.int64, 2))]
    images: NonNegativeInt


class MeasuredReply(ReplyForm):
    """Reply with the result of `as_data`."""

    episodes: Annotated[Array, PlainValidator(array_of(np.uint8, 1))]
    values: dict[str, ValuesReply]
    histograms: dict[str, HistogramReply]


def from_data(data: Any) -> Measured:
    """Return the measurements from the result of `as_data`. Raises ValueError if `data` has another form."""
    reply = MeasuredReply.model_validate(data)
    return Measured(
        pa.ipc.open_stream(reply.episodes).read_all(),
        {
            name: FeatureValues(tuple(each.parts), each.count, each.mean, each.squares)
            for name, each in reply.values.items()
        },
        {name: Histogram(each.counts, each.images) for name, each in reply.histograms.items()},
    )


MEASURED = TypeAdapter(Annotated[Measured, PlainValidator(from_data)])


def _lists(values: Array) -> pa.Array:
    """Return an Arrow array with one cell per index of the first axis. A cell has nested lists for the other axes."""
    array = pa.array(values.reshape(-1))
    for length in reversed(values.shape[1:]):
        array = pa.ListArray.from_arrays(np.arange(len(array) // length + 1, dtype=np.int32) * length, array)
    return array


Finished = Callable[[tuple[int, Measured]], None]

NUMBERS_AT_ONCE, IMAGES_AT_ONCE = 1024, 8
"""Maximum number of episodes in a unit whose features are only numbers, and in a unit with images."""
UNIT_SECONDS, ATTEMPTS = 3600.0, 3
"""Time limit in seconds for a worker to measure a unit, and number of times that a unit is tried if workers die."""


@dataclass(frozen=True)
class MeasurementUnit:
    """Episodes `first` to `last` (inclusive) of one data file, and the features to measure."""

    first: int
    last: int
    numbers: tuple[str, ...]
    images: tuple[str, ...]
    all_images: bool


def plan(
    dataset: Dataset, settings: QuantileStatsSettings, episodes: Sequence[int], without: str | None = None
) -> list[MeasurementUnit]:
    """Divide these ascending episodes into units. The units are the same on every machine.

    Args:
        without: a feature that is only measured if the settings name it, such as weights of frames.

    Raises:
        ConfigurationError: a feature is unknown, or neither numeric nor an image.
    """
    chosen = settings.features or tuple(
        name
        for name, feature in dataset.info.features.items()
        if (feature.is_number or feature.is_visual) and name != without
    )
    for name in chosen:
        if not (dataset.feature(name).is_number or dataset.feature(name).is_visual):
            raise ConfigurationError(
                f"feature {name!r} is {dataset.feature(name).dtype}, neither a number nor an image",
                code="feature_not_measurable",
                where="statistics.features",
                remedy="name features that are numbers or images, or leave the setting out",
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
    """Measure the statistics of a unit.

    Raises:
        DataError: a file is damaged, or a value is not finite.
    """
    statistics: dict[str, dict[str, Array]] = {}
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
        statistics[name] = {
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
        statistics[name] = {key: np.stack([each[key] for each in arrays]) for key in arrays[0]}
        counted[name] = histograms.merge(parts)
    return Measured(episodes_table(statistics), values, counted)


def measure_dataset(
    dataset: Dataset, units: Sequence[MeasurementUnit], machine: Machine, progress: Callable[[int], None]
) -> Measured:
    """Measure all units and merge them in order, so that the result does not depend on who computes a unit.

    Args:
        progress: called with the number of finished units.
    """
    measured: dict[int, Measured] = {}

    def finished(result: tuple[int, Measured]) -> None:
        measured.update([result])
        progress(len(measured))

    run = _on_workers if machine.workers.statistics else _on_threads
    run(dataset, units, machine, finished)
    return merge([measured[number] for number in range(len(units))])


def overall(dataset: Dataset, measured: Measured, threads: int) -> dict[str, FeatureStatistics]:
    """Return the statistics over all frames, in the order of the dataset's features."""
    by_name = {name: each.statistics() for name, each in measured.histograms.items()}
    for name, values in measured.values.items():
        by_name[name] = values.statistics(threads).reshape(dataset.feature(name).shape)
    return {name: by_name[name] for name in dataset.info.features if name in by_name}


def cores(machine: Machine) -> int:
    """Return the machine's number of threads, or the number of available CPUs if it has no such setting."""
    return machine.threads or available_cpus()


def _on_threads(dataset: Dataset, units: Sequence[MeasurementUnit], machine: Machine, finished: Finished) -> None:
    with ThreadPoolExecutor(cores(machine), thread_name_prefix="statistics") as executor:
        try:
            for result in enumerate(executor.map(partial(measure_unit, dataset=dataset), units)):
                finished(result)
        finally:
            executor.shutdown(cancel_futures=True)


def _on_workers(dataset: Dataset, units: Sequence[MeasurementUnit], machine: Machine, finished: Finished) -> None:
    """Measure on worker processes, which open the dataset by its path; units of one data file go to the same worker."""
    opened = {"files": str(dataset.files), "quick_digest": dataset.files.quick_digest()}
    files = dataset.episodes.numbers[["chunk", "file"]]

    def measure(worker: Worker, job: tuple[int, MeasurementUnit]) -> tuple[int, Measured]:
        return job[0], worker.call("measure", *astuple(job[1]), reply=MEASURED)

    def start() -> Worker:
        return make_worker("armature.components.robots.datasets.worker", opened, timeout=UNIT_SECONDS)

    with WorkerPool(start, machine.workers.statistics) as workers:
        workers.run(enumerate(units), measure, lambda job: files[job[1].first].item(), finished, ATTEMPTS)
