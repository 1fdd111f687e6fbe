"""Numbers that JSON has no word for, between processes and in files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter
from pydantic_core import to_json, to_jsonable_python

from armature.components.contracts.settings import not_json

_FLOATS = TypeAdapter(dict[str, float])


def dump_json(value: Any, indent: int | None = None) -> bytes:
    """Strict JSON of `value`; NaN and the infinities are the strings "NaN", "Infinity" and "-Infinity"."""
    return to_json(value, indent=indent, inf_nan_mode="strings")


def write_json(path: Path, value: Any) -> None:
    """Write `value` for people and programs: its keys in order, numbers as in `dump_json`."""
    plain = to_jsonable_python(value, inf_nan_mode="strings")
    path.write_text(json.dumps(plain, indent=1, sort_keys=True, allow_nan=False) + "\n")


def read_finite(content: bytes | str) -> Any:
    """Read JSON whose numbers are finite: Python's reader takes NaN, Infinity and 1e999 as well.

    Raises:
        ValueError: not JSON, or a number is not finite; the message has its path.
    """
    document = json.loads(content)
    if problem := not_json(document, "value"):
        raise ValueError(problem)
    return document


def read_floats(values: Mapping[str, Any]) -> dict[str, float]:
    """Metrics as `dump_json` wrote them.

    Raises:
        ValueError: a value is neither a number nor one of those strings.
    """
    return _FLOATS.validate_python(values)
