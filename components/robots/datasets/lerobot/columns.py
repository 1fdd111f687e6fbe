"""Conversion between Arrow columns and arrays of a feature's shape, and checks of a data file's rows."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from armature.components.contracts.errors import DataError
from armature.components.robots.datasets.lerobot.layout import IMAGE, OWN_FEATURES, Feature
from armature.components.robots.datasets.quantiles import Array

AGAIN = "fetch, record or convert the dataset again"
"""Remedy of errors in a data file."""
PNG = pa.struct([("bytes", pa.binary()), ("path", pa.string())])


def arrow_type(feature: Feature) -> pa.DataType:
    """Return the type of a feature's column in a data file; videos have no column."""
    if feature.dtype == IMAGE:
        return PNG
    value = pa.string() if feature.dtype == "string" else pa.from_numpy_dtype(np.dtype(feature.dtype))
    if feature.shape == (1,):
        return value
    return nested(value, feature.shape)


def nested(value: pa.DataType, shape: tuple[int, ...]) -> pa.DataType:
    """Return the Arrow type of an array of this shape: fixed-size lists, nested once per dimension, of type `value`."""
    for length in reversed(shape):
        value = pa.list_(value, length)
    return value


def to_arrow(values: Array, feature: Feature) -> pa.Array:
    """Return a feature's `values` (frames, *shape) as an Arrow column with one cell per frame."""
    if feature.shape == (1,):
        return pa.array(values.reshape(-1))
    array = pa.array(np.ascontiguousarray(values).reshape(-1))
    for length in reversed(feature.shape):
        array = pa.FixedSizeListArray.from_arrays(array, length)
    return array


def to_numpy(column: pa.ChunkedArray, name: str, feature: Feature, where: str) -> Array:
    """Return a numeric column as (frames, width). The width is the number of values per frame, flat or nested.

    Raises:
        DataError: a value is missing, frames differ in size, or the column does not have the feature's type.
    """
    array, sizes = column.combine_chunks(), list[int]()
    while _is_list(array.type) and not array.null_count:
        lengths = pc.list_value_length(array).to_numpy(zero_copy_only=False)
        if (ragged := np.flatnonzero(lengths != lengths[:1])).size:
            row = int(ragged[0]) // math.prod(sizes)
            raise DataError(
                f"feature {name!r} has lists of {lengths[0]} and of {lengths[ragged[0]]} values",
                code="feature_ragged",
                where=f"{where}, row {row}",
                remedy="every frame needs the same shape; record or convert the dataset again",
            )
        sizes.append(int(lengths[0]) if len(lengths) else 0)
        array = array.flatten()
    if array.null_count:
        raise DataError(f"feature {name!r} has missing values", code="feature_value_missing", where=where, remedy=AGAIN)
    width = math.prod(feature.shape)
    shaped = tuple(sizes) in (feature.shape, (width,)) or (width == 1 and not sizes) or not len(column)
    if not shaped or not _holds(feature, array.type):
        raise DataError(
            f"feature {name!r} has frames of {sizes or [1]} values of {array.type}, "
            f"meta/info.json has {list(feature.shape)} of {feature.dtype}",
            code="frame_shape_mismatch",
            where=where,
            remedy=f"correct meta/info.json, or {AGAIN}",
        )
    values: Array = array.to_numpy(zero_copy_only=False).reshape(len(column), width)
    return values


def _is_list(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_fixed_size_list(kind) or pa.types.is_large_list(kind))


def _holds(feature: Feature, kind: pa.DataType) -> bool:
    """Return True if a feature's column may have the Arrow type `kind`: its values convert without being truncated."""
    if pa.types.is_boolean(kind):
        return feature.dtype == "bool"
    if pa.types.is_floating(kind):
        return feature.dtype.startswith("float")
    return bool(pa.types.is_integer(kind)) and feature.dtype != "bool"


def described(features: dict[str, Feature]) -> bytes:
    """Return the value of the key "huggingface" in a data file's schema metadata: JSON that describes the features."""
    kinds: dict[str, Any] = {}
    for name, feature in features.items():
        kind: dict[str, Any] = {"dtype": feature.dtype, "_type": "Value"}
        if feature.dtype == IMAGE:
            kind = {"_type": "Image"}
        elif feature.shape != (1,):
            for length in reversed(feature.shape):
                kind = {"feature": kind, "length": length, "_type": "Sequence"}
        kinds[name] = kind
    return json.dumps({"info": {"features": kinds}}).encode()


# --- Columns that identify the frame in a row of a data file: episode, number, time ---

TOLERANCE = 1e-4
"""Tolerance of timestamps in seconds, LeRobot's `tolerance_s`."""
PLACES = ("episode_index", "frame_index", "index", "timestamp")


@dataclass(frozen=True)
class ExpectedRows:
    """Rows that a data file must have for consecutive episodes.

    episode: number of the first episode. start: index of its first frame in the dataset.
    lengths: number of frames of each episode, (episodes,).
    """

    episode: int
    start: int
    lengths: Array
    fps: float

    def check(self, table: pa.Table, path: str, row: int) -> None:
        """Check the columns `PLACES` of `table`, which starts at row `row` of the data file at `path`.

        Within an episode, `frame_index` and `index` must grow by 1 and `timestamp` by 1 / fps. An episode whose
        beginning was cut off may start at a later time.

        Raises:
            DataError: a row is not the expected one; the error names episode and row.
        """
        columns = {name: self._numbers(table, name, path, row) for name in PLACES}
        episodes, frames, index, times = columns.values()
        numbers = np.repeat(np.arange(self.episode, self.episode + len(self.lengths)), self.lengths)
        wrong = episodes[: len(numbers)] != numbers[: len(episodes)]
        if len(episodes) != len(numbers) or wrong.any():
            at = int(np.argmax(wrong)) if wrong.any() else len(episodes)
            raise DataError(
                f"{len(episodes)} of {len(numbers)} frames are present, and this row belongs to another episode",
                code="episode_rows_mismatch",
                where=f"{path}, episode {numbers[min(at, len(numbers) - 1)]}, row {row + at}",
                remedy="meta/episodes and the data files do not belong together; fetch the dataset again",
            )
        begins = np.cumsum(self.lengths) - self.lengths
        first = np.repeat(begins, self.lengths)
        within = np.arange(len(numbers)) - first
        index_of = self.start + np.arange(len(numbers))
        frame_of = np.maximum(frames[first], 0) + within
        seconds = times.astype(np.float64)
        with np.errstate(over="ignore", invalid="ignore"):  # NaN and infinities compare as wrong
            begin = np.where(frames > 0, frames / self.fps, np.maximum(seconds, 0))
            second_of = np.where(within > 0, np.roll(seconds, 1) + 1 / self.fps, begin)
            slack = TOLERANCE + (np.spacing(np.abs(times)) if times.dtype.kind == "f" else 0.0)
            late = ~(np.abs(seconds - second_of) <= slack)
        for name, values, expected, wrong in (
            ("index", index, index_of, index != index_of),
            ("frame_index", frames, frame_of, frames != frame_of),
            ("timestamp", seconds, second_of, late),
        ):
            if wrong.any():
                at = int(np.argmax(wrong))
                raise DataError(
                    f"{name} is {values[at]:.9g}, not {expected[at]:.9g}: rows must be consecutive, "
                    f"{self.fps:g} per second",
                    code="row_out_of_order",
                    where=f"{path}, episode {numbers[at]}, row {row + at}",
                    remedy="rows are missing or out of order, or fps in meta/info.json is wrong; "
                    "split the episode there, or record it again",
                )

    def _numbers(self, table: pa.Table, name: str, path: str, row: int) -> Array:
        if name not in table.column_names:
            raise DataError(f"the data file has no column {name!r}", code="column_missing", where=path, remedy=AGAIN)
        column = table[name]
        if column.null_count:
            at = int(np.argmax(column.is_null().to_numpy()))
            ends = np.cumsum(self.lengths)
            episode = self.episode + min(int(np.searchsorted(ends, at, side="right")), len(ends) - 1)
            raise DataError(
                f"{name} is missing",
                code="feature_value_missing",
                where=f"{path}, episode {episode}, row {row + at}",
                remedy=AGAIN,
            )
        values: Array = to_numpy(column, name, OWN_FEATURES[name], f"{path}, from episode {self.episode}")[:, 0]
        return values


# --- Sample of an episode's frames for image statistics ---


def sampled(length: int) -> list[int]:
    """Return the frames that LeRobot samples for image statistics, evenly spaced.

    There are `length` ** 0.75 of them, at least 100 and at most 10,000, or all if there are fewer.

    Example:
        >>> len(sampled(1000)), sampled(3)
        (177, [0, 1, 2])
    """
    count = min(length, max(100, min(int(length**0.75), 10_000)))
    return [int(place) for place in np.round(np.linspace(0, length - 1, count))]
