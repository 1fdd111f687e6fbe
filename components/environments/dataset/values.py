"""Convert the values of tables to plain Python values, the same for every file format.

Values are None (for null, NaN and infinities), booleans, numbers as in JSON (22.0 becomes 22), text, bytes, and lists
and dicts of these. Dates and times become text. A number of lower precision keeps its digits: float32's 0.1 becomes
0.1, not 0.10000000149.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from datetime import date, time, timedelta
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa

from armature.components.contracts.value_text import plain_number, value_text
from armature.components.environments.dataset.bad_rows import BadRow

_NARROW: Mapping[pa.DataType, type[np.floating[Any]]] = {pa.float16(): np.float16, pa.float32(): np.float32}
_SIMPLE = (pa.types.is_string, pa.types.is_large_string, pa.types.is_binary, pa.types.is_integer, pa.types.is_boolean)
DEEPEST = 64
"""Largest number of levels of nested lists and objects in a row.

Python's recursion limit would be reached at a level that depends on the caller's depth.
"""


def read_json(text: str) -> Any:
    """Parse JSON into plain values.

    Raises:
        ValueError, RecursionError: the text is not JSON, an object has a key twice, or values are nested too deeply.

    Example:
        >>> read_json('{"a": [22.0, 0.5, NaN]}')
        {'a': [22, 0.5, None]}
    """
    value = json.loads(
        text,
        parse_float=lambda digits: plain_number(float(digits)),
        parse_constant=lambda name: None,
        object_pairs_hook=_unique_keys,
    )
    level = [value] if text.count("[") + text.count("{") > DEEPEST else []
    for _ in range(DEEPEST + 1):
        level = [child for each in level for child in _children(each)]
    if level:
        raise ValueError(f"more than {DEEPEST} levels of nested lists and objects")
    return value


def _children(value: Any) -> Iterable[Any]:
    return value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Make a dict from an object's pairs.

    Raises:
        ValueError: a key appears twice. JSON readers would silently keep the last value.
    """
    values = dict(pairs)
    if len(values) < len(pairs):
        raise ValueError("an object has a key twice")
    return values


def column_values(column: pa.ChunkedArray) -> list[Any]:
    """Return an Arrow column as a list of plain values.

    Raises:
        BadRow: Python has no type for a value (`unreadable`), such as a date after the year 9999.
    """
    try:
        values: list[Any] = column.to_pylist()
    except (ValueError, OverflowError, ArithmeticError, KeyError, NotImplementedError, pa.ArrowException) as error:
        raise BadRow("unreadable", f"a value of type {column.type} cannot be read: {error}") from error
    plain = _reader(column.type)
    return values if plain is None else [plain(value) for value in values]


def _reader(kind: pa.DataType) -> Callable[[Any], Any] | None:
    """Return a function that makes values of an Arrow type plain, or None if they already are."""
    while hasattr(kind, "storage_type") or pa.types.is_dictionary(kind) or pa.types.is_run_end_encoded(kind):
        kind = kind.storage_type if hasattr(kind, "storage_type") else kind.value_type
    if kind in _NARROW:
        narrow = _NARROW[kind]
        return lambda value: value if value is None else _narrowed(value, narrow)
    if pa.types.is_struct(kind):
        fields = {field.name: _reader(field.type) or plain_value for field in kind}
        return lambda value: value and {name: fields[name](each) for name, each in value.items()}
    if pa.types.is_map(kind):
        key, item = (_reader(each) or plain_value for each in (kind.key_type, kind.item_type))
        return lambda value: value and [[key(name), item(each)] for name, each in value]
    if pa.types.is_nested(kind) and hasattr(kind, "value_type"):
        each_of = _reader(kind.value_type)
        return each_of and (lambda value: value and [each_of(each) for each in value])
    return None if any(is_simple(kind) for is_simple in _SIMPLE) else plain_value


def _narrowed(value: float, narrow: type[np.floating[Any]]) -> int | float | str | None:
    """Return the number with the shortest digits of its narrow type. Arrow widens to float64, which adds digits."""
    plain = plain_number(value)
    return float(value_text(narrow(value))) if isinstance(plain, float) else plain


def plain_value(value: Any) -> Any:
    if isinstance(value, float | Decimal):
        return plain_number(value)
    if isinstance(value, date | time | timedelta):
        return value_text(value)
    if isinstance(value, list | tuple):
        return [plain_value(each) for each in value]
    if isinstance(value, dict):
        return {name: plain_value(each) for name, each in value.items()}
    return value
