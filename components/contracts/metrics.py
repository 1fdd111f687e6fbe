"""Join the metrics of several writers, name metrics safely, and write NaN and infinite numbers to JSON."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from statistics import fmean
from typing import Any

from pydantic import TypeAdapter
from pydantic_core import to_json, to_jsonable_python

from armature.components.contracts.settings import not_json

# --- Names of metrics: each metric has one writer; a name that users choose is one part of a metric's name ---

_LONGEST = 100
"""Maximum number of characters of one part of a metric's name."""
_PLAIN = re.compile(r"[\w-](?:[\w. -]*[\w.-])?")
"""Pattern of the names that every metrics store accepts as one part of a metric's name."""


def merged(**writers: Mapping[str, float]) -> dict[str, float]:
    """Join the metrics of several writers, in the order of the arguments.

    Each keyword argument is the name of a writer, with its metrics as the value.

    >>> merged(trainer={"loss": 0.5}, rollouts={"reward": 1.0})
    {'loss': 0.5, 'reward': 1.0}

    Raises:
        ValueError: two writers have the same metric; the message names the metric and both writers.
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
    """Return the metrics with `namespace/` put before each name.

    It is for names that users or environments choose, such as those of reward parts: a name that a metrics store would
    refuse is changed.

    >>> metrics_below("reward_parts", {"mean": 1, "a/b": 2})
    {'reward_parts/mean': 1.0, 'reward_parts/a_b-c14cddc0': 2.0}
    """
    return {f"{namespace}/{metric_part(name)}": float(value) for name, value in values.items()}


def last_tenth(history: Sequence[Mapping[str, float]], keys: Iterable[str]) -> dict[str, float]:
    """Return the mean of each metric over the last tenth of the rows, at least one, of those that have the metric.

    A metric that none of these rows has is left out: a step that changes no weight, for example, has no ratio.

    >>> last_tenth([{"loss": 4.0}] * 10 + [{"loss": 1.0}] * 9 + [{"entropy": 2.0}], ["loss", "entropy", "ratio"])
    {'loss': 1.0, 'entropy': 2.0}
    """
    tail = history[-max(1, len(history) // 10) :]
    values = {key: [row[key] for row in tail if key in row] for key in keys}
    return {key: fmean(each) for key, each in values.items() if each}


def counted_reasons(history: Iterable[Mapping[str, float]]) -> dict[str, int]:
    """Return, for each reason, how many rollouts failed and samples were dropped for it in a run's history.

    `history` has the metrics of each step; the counts of rollouts and samples are added up.
    """
    counts: Counter[str] = Counter()
    for step in history:
        for name, count in step.items():
            if name.startswith(("failures/", "drops/")):
                counts[name.partition("/")[2]] += int(count)
    return dict(sorted(counts.items()))


def metric_part(name: str) -> str:
    """Return `name` if every metrics store accepts it as one part of a metric's name, else a readable substitute.

    MLflow accepts letters, digits, spaces and `_-.`, and only normalized paths. Other characters become `_`, and a
    digest of the original name keeps names different that would otherwise become equal.
    """
    if _PLAIN.fullmatch(name) and len(name) <= _LONGEST:
        return name
    readable = re.sub(r"[^\w. -]", "_", name[:_LONGEST]).strip(" .")
    return f"{readable}-{sha256(name.encode()).hexdigest()[:8]}".lstrip("-")


# --- JSON with NaN and infinite numbers, between processes and in files ---

_FLOATS = TypeAdapter(dict[str, float])


def dump_json(value: Any, indent: int | None = None) -> bytes:
    """Return strict JSON, in which NaN and infinities are the strings "NaN", "Infinity" and "-Infinity"."""
    return to_json(value, indent=indent, inf_nan_mode="strings")


def write_json(path: Path, value: Any) -> None:
    """Write indented JSON with sorted keys; NaN and infinities are strings as in `dump_json`."""
    plain = to_jsonable_python(value, inf_nan_mode="strings")
    path.write_text(json.dumps(plain, indent=1, sort_keys=True, allow_nan=False) + "\n")


def read_finite(content: bytes | str) -> Any:
    """Read JSON and check that all numbers are finite. (Python's reader also accepts NaN, Infinity and 1e999.)

    Raises:
        ValueError: it is not JSON, or a number is not finite; the message has the path of the number.
    """
    document = json.loads(content)
    if problem := not_json(document, "value"):
        raise ValueError(problem)
    return document


def read_floats(values: Mapping[str, Any]) -> dict[str, float]:
    """Return metrics as floats, from values that `dump_json` wrote.

    Raises:
        ValueError: a value is neither a number nor "NaN", "Infinity" or "-Infinity".
    """
    return _FLOATS.validate_python(values)
