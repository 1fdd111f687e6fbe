"""Between Arrow columns and arrays of a feature's shape."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pyarrow as pa

from components.contracts.errors import DataError
from components.datasets.lerobot.layout import IMAGE, Feature
from components.datasets.statistics import Array

PNG = pa.struct([("bytes", pa.binary()), ("path", pa.string())])


def arrow_type(feature: Feature) -> pa.DataType:
    """How a feature lies in a data file; videos do not."""
    if feature.dtype == IMAGE:
        return PNG
    value = pa.string() if feature.dtype == "string" else pa.from_numpy_dtype(np.dtype(feature.dtype))
    if feature.shape == (1,):
        return value
    return nested(value, feature.shape)


def nested(value: pa.DataType, shape: tuple[int, ...]) -> pa.DataType:
    for length in reversed(shape):
        value = pa.list_(value, length)
    return value


def to_arrow(values: Array, feature: Feature) -> pa.Array:
    """Of (frames, *shape)."""
    if feature.shape == (1,):
        return pa.array(values.reshape(-1))
    array = pa.array(np.ascontiguousarray(values).reshape(-1))
    for length in reversed(feature.shape):
        array = pa.FixedSizeListArray.from_arrays(array, length)
    return array


def to_numpy(column: pa.ChunkedArray, name: str, feature: Feature, where: str) -> Array:
    """(frames, width) of a numeric column, width being all that a frame has.

    Raises:
        DataError: a frame is missing or of another size, or the column is not of the feature's type.
    """
    array, width = column.combine_chunks(), int(np.prod(feature.shape))
    frames = len(array)
    while pa.types.is_list(array.type) or pa.types.is_fixed_size_list(array.type) or pa.types.is_large_list(array.type):
        if array.null_count:
            break
        array = array.flatten()
    if array.null_count:
        raise DataError(f"feature {name!r} has missing values", where=where)
    if len(array) != frames * width or not (pa.types.is_primitive(array.type) or pa.types.is_boolean(array.type)):
        lengths = {len(row) if isinstance(row, list) else 1 for row in column.slice(0, 1000).to_pylist()}
        raise DataError(
            f"feature {name!r} has frames of {sorted(lengths)} values of {array.type}, "
            f"meta/info.json says {list(feature.shape)} of {feature.dtype}",
            where=where,
        )
    values: Array = array.to_numpy(zero_copy_only=False).reshape(frames, width)
    return values


def described(features: dict[str, Feature]) -> bytes:
    """The "huggingface" metadata of a data file's schema."""
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
