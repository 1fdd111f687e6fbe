"""Between Arrow columns and arrays of a feature's shape."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from armature.components.contracts.errors import DataError
from armature.components.datasets.lerobot.layout import IMAGE, Feature
from armature.components.datasets.statistics import Array

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
    """(frames, width) of a numeric column, width being all that a frame has, flat or nested as the shape says.

    Raises:
        DataError: a frame is missing or of another size than the others, or the column is not of the feature's type.
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
        raise DataError(f"feature {name!r} has missing values", code="feature_value_missing", where=where)
    width = math.prod(feature.shape)
    shaped = tuple(sizes) in (feature.shape, (width,)) or (width == 1 and not sizes) or not len(column)
    if not shaped or not _holds(feature, array.type):
        raise DataError(
            f"feature {name!r} has frames of {sizes or [1]} values of {array.type}, "
            f"meta/info.json says {list(feature.shape)} of {feature.dtype}",
            code="frame_shape_mismatch",
            where=where,
        )
    values: Array = array.to_numpy(zero_copy_only=False).reshape(len(column), width)
    return values


def _is_list(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_fixed_size_list(kind) or pa.types.is_large_list(kind))


def _holds(feature: Feature, kind: pa.DataType) -> bool:
    """Whether values of an Arrow type are values of the feature: none is cut off to become one."""
    if pa.types.is_boolean(kind):
        return feature.dtype == "bool"
    if pa.types.is_floating(kind):
        return feature.dtype.startswith("float")
    return bool(pa.types.is_integer(kind)) and feature.dtype != "bool"


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
