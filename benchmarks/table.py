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
    """`ours` and `baseline` in `unit`; `better` says which way is good. The ratio is ours over baseline."""

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
    """Medians of both sides, and the smallest and largest ratio of one round."""

    ours: float
    baseline: float
    spread: tuple[float, float]


def pair(ours: Sequence[float], baseline: Sequence[float]) -> Pair:
    """Statistics of measurements that were taken in turn, round by round."""
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
    """Put the rows of one benchmark into the results, and write the page again."""
    when = {"cores": os.cpu_count(), "date": date.today().isoformat()}
    write(name, when | {"rows": [asdict(row) | {"ratio": row.ratio} for row in rows]})


def write(name: str, result: dict[str, object]) -> None:
    """Put one benchmark's result under its name, and write the page again."""
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
    """(width, tokens, figures by name), in the order given."""
    sizes: dict[tuple[int, int], dict[str, dict[str, Any]]] = {}
    for figure in figures:
        sizes.setdefault((figure["width"], figure["tokens"]), {})[figure["name"]] = figure
    return [(width, tokens, named) for (width, tokens), named in sizes.items()]


def spread(values: Sequence[float] | None) -> str:
    """The smallest and the largest of some measurements, in brackets; nothing where they were not kept."""
    return "" if values is None else f" ({short(min(values))} to {short(max(values))})"


def short(value: float | None) -> str:
    """Three significant digits, with thousands separated; None: what did not fit."""
    if value is None:
        return "-"
    if value == 0:
        return "0"
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}"
