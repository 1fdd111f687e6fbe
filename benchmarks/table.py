"""Figures of benchmarks, and the one template that turns them into docs/benchmarks.md."""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined

HERE = Path(__file__).parent
RESULTS = HERE / "results.json"
TEMPLATE = HERE / "benchmarks.md.j2"
PAGE = HERE.parent / "docs/benchmarks.md"


@dataclass(frozen=True)
class Row:
    """One line of the results. `ours` and `baseline` are measured in `unit`; `better` says if higher or lower is
    better. The ratio is ours / baseline."""

    what: str
    ours: float
    baseline: float
    baseline_name: str
    unit: str
    better: str  # "higher" or "lower"
    note: str = ""
    spread: tuple[float, float] | None = None  # smallest and largest ratio of one round

    @property
    def ratio(self) -> float:
        return self.ours / self.baseline

    def __str__(self) -> str:
        spread = f" [{self.spread[0]:.3g} to {self.spread[1]:.3g}]" if self.spread else ""
        return (
            f"{self.what:<44} {self.ours:>10.4g} {self.unit:<10} {self.baseline_name}: {self.baseline:.4g}   "
            f"ratio {self.ratio:.3f}{spread} ({self.better} is better) {self.note}"
        )


@dataclass(frozen=True)
class Pair:
    """Medians of the measurements of both sides. `spread` has the smallest and the largest ratio of a single round."""

    ours: float
    baseline: float
    spread: tuple[float, float]


def pair(ours: Sequence[float], baseline: Sequence[float]) -> Pair:
    """Return the medians and the spread of measurements that were taken in turn, one per side and round."""
    ratios = [a / b for a, b in zip(ours, baseline, strict=True)]
    return Pair(statistics.median(ours), statistics.median(baseline), (min(ratios), max(ratios)))


def alternate(rounds: int, ours: Callable[[], float], baseline: Callable[[], float]) -> Pair:
    """Measure both sides in turn, so that a busy machine disturbs both alike."""
    taken: tuple[list[float], list[float]] = ([], [])
    for round_ in range(rounds):
        for index in (0, 1) if round_ % 2 == 0 else (1, 0):
            taken[index].append((ours, baseline)[index]())
    return pair(*taken)


def seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def keep(name: str, rows: list[Row]) -> None:
    """Write the rows of one benchmark into the results file, and write the page again."""
    when = {"cores": os.cpu_count(), "date": date.today().isoformat()}
    write(name, when | {"rows": [asdict(row) | {"ratio": row.ratio} for row in rows]})


def write(name: str, result: dict[str, object]) -> None:
    """Write the result of one benchmark into the results file under its name, and write the page again."""
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    results[name] = result
    RESULTS.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")
    PAGE.write_text(render(results))


def render(results: dict[str, object]) -> str:
    from benchmarks.run import BENCHMARKS

    environment = Environment(undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, autoescape=False)
    environment.filters["short"] = short
    environment.filters["by_size"] = by_size
    environment.filters["spread"] = spread
    template = environment.from_string(TEMPLATE.read_text())
    return template.render(results=results, benchmarks=BENCHMARKS) + "\n"


def by_size(figures: list[dict[str, Any]]) -> list[tuple[int, int, dict[str, dict[str, Any]]]]:
    """Group figures by size. Return tuples of width, tokens, and the figures of this size by name, in the given
    order."""
    sizes: dict[tuple[int, int], dict[str, dict[str, Any]]] = {}
    for figure in figures:
        sizes.setdefault((figure["width"], figure["tokens"]), {})[figure["name"]] = figure
    return [(width, tokens, named) for (width, tokens), named in sizes.items()]


def spread(values: Sequence[float] | None) -> str:
    """Return the smallest and the largest measurement in parentheses, or an empty text if there are no measurements."""
    return "" if values is None else f" ({short(min(values))} to {short(max(values))})"


def short(value: float | None) -> str:
    """Return a number as text with three significant digits and thousands separators. None stands for a measurement
    that did not fit in memory; its text is "-"."""
    if value is None:
        return "-"
    if value == 0:
        return "0"
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}"
