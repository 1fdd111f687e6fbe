"""What was measured of some episodes: it merges, and travels between processes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
import pyarrow as pa
from pydantic import NonNegativeInt, PlainValidator, TypeAdapter

from armature.components.contracts.errors import DataError
from armature.components.datasets import histograms, quantiles
from armature.components.datasets.histograms import Histogram
from armature.components.datasets.quantiles import FeatureValues
from armature.components.datasets.statistics import Array
from armature.components.workers.requests import ReplyForm, array_of


@dataclass(frozen=True)
class Measured:
    """Statistics of each episode, in order, and what those of all merge from.

    `episodes` has a row for each, with columns named as in a dataset's meta/episodes: `stats/<feature>/<statistic>`.
    """

    episodes: pa.Table
    values: dict[str, FeatureValues]
    histograms: dict[str, Histogram]


def episodes_table(found: Mapping[str, Mapping[str, Array]]) -> pa.Table:
    """`found` are each feature's statistics by name, (episodes, *shape)."""
    return pa.table({f"stats/{name}/{key}": _lists(each[key]) for name, each in found.items() for key in each})


def merge(parts: Sequence[Measured]) -> Measured:
    """All of what was measured, as one: the features that all parts have.

    Raises:
        DataError: a feature has another width in another part, or they have none in common.
    """
    values = [name for name in parts[0].values if all(name in part.values for part in parts)]
    images = [name for name in parts[0].histograms if all(name in part.histograms for part in parts)]
    if not values and not images:
        raise DataError(
            "they have no feature in common",
            code="no_common_feature",
            where="datasets of the same tag",
            remedy="give them different tags",
        )
    for name in values:
        if len(widths := {len(part.values[name].mean) for part in parts}) > 1:
            raise DataError(
                f"feature {name!r} has {sorted(widths)} values a frame",
                code="feature_widths_differ",
                where="datasets of the same tag",
                remedy="give datasets of different robots different tags",
            )
    episodes = pa.concat_tables([part.episodes for part in parts], promote_options="default")
    return Measured(
        episodes.select(parts[0].episodes.column_names),
        {name: quantiles.merge([part.values[name] for part in parts]) for name in values},
        {name: histograms.merge([part.histograms[name] for part in parts]) for name in images},
    )


def as_data(measured: Measured) -> dict[str, Any]:
    """JSON and arrays."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, measured.episodes.schema) as writer:
        writer.write_table(measured.episodes)
    return {
        "episodes": np.frombuffer(sink.getvalue(), np.uint8),
        "values": {name: vars(each) for name, each in measured.values.items()},
        "histograms": {name: vars(each) for name, each in measured.histograms.items()},
    }


class ValuesReply(ReplyForm):
    """The fields of a `FeatureValues`."""

    parts: list[np.ndarray]
    count: NonNegativeInt
    mean: Annotated[Array, PlainValidator(array_of(np.float64, 1))]
    squares: Annotated[Array, PlainValidator(array_of(np.float64, 1))]


class HistogramReply(ReplyForm):
    """The fields of a `Histogram`."""

    counts: Annotated[Array, PlainValidator(array_of(np.int64, 2))]
    images: NonNegativeInt


class MeasuredReply(ReplyForm):
    """The form of the document that `as_data` returns."""

    episodes: Annotated[Array, PlainValidator(array_of(np.uint8, 1))]
    values: dict[str, ValuesReply]
    histograms: dict[str, HistogramReply]


def from_data(data: Any) -> Measured:
    """What `as_data` was given. Raises ValueError if it is not what `as_data` gives."""
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
    """A cell per first index, nested as the other dimensions are."""
    array = pa.array(values.reshape(-1))
    for length in reversed(values.shape[1:]):
        array = pa.ListArray.from_arrays(np.arange(len(array) // length + 1, dtype=np.int32) * length, array)
    return array
