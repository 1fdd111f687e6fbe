"""Names of metrics, and numbers that JSON has no word for."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter
from pydantic_core import to_json, to_jsonable_python

from armature.components.contracts.settings import not_json

# Names of metrics: each has one writer, and a name that somebody chose is one part of a metric's name.

_LONGEST = 100
_PLAIN = re.compile(r"[\w-](?:[\w. -]*[\w.-])?")


def merged(**writers: Mapping[str, float]) -> dict[str, float]:
    """Join the metrics of several writers, in their order.

    >>> merged(trainer={"loss": 0.5}, rollouts={"reward": 1.0})
    {'loss': 0.5, 'reward': 1.0}

    Raises:
        ValueError: two writers have the same metric; names it and both.
    """
    metrics: dict[str, float] = {}
    owners: dict[str, str] = {}
    for writer, values in writers.items():
        for name, value in values.items():
            if name in owners:
                raise ValueError(f"the metric {name!r} is written by {owners[name]} and by {writer}")
            metrics[name], owners[name] = value, writer
    return metrics


def metrics_below(namespace: str, values: Mapping[str, float]) -> dict[str, float]:
    """Metrics with names that users and environments choose, such as reward parts, below a name of ours.

    >>> metrics_below("reward_parts", {"mean": 1, "a/b": 2})
    {'reward_parts/mean': 1.0, 'reward_parts/a_b-c14cddc0': 2.0}
    """
    return {f"{namespace}/{metric_part(name)}": float(value) for name, value in values.items()}


def counted_reasons(history: Iterable[Mapping[str, float]]) -> dict[str, int]:
    """How often each reason was counted over the steps of a run, of failed rollouts and of dropped samples together."""
    counts: Counter[str] = Counter()
    for step in history:
        for name, count in step.items():
            if name.startswith(("failures/", "drops/")):
                counts[name.partition("/")[2]] += int(count)
    return dict(sorted(counts.items()))


def metric_part(name: str) -> str:
    """Return `name` if it can be one part of a metric's name wherever metrics are kept, else a readable one.

    MLflow takes letters, digits, spaces and `_-.`, in paths that are normal. Other characters become `_`, and a digest
    of the name keeps two apart that would become the same.
    """
    if _PLAIN.fullmatch(name) and len(name) <= _LONGEST:
        return name
    readable = re.sub(r"[^\w. -]", "_", name[:_LONGEST]).strip(" .")
    return f"{readable}-{sha256(name.encode()).hexdigest()[:8]}".lstrip("-")


# Numbers that JSON has no word for, between processes and in files.

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
