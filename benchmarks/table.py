"""Figures of benchmarks, and the one template that turns them into docs/benchmarks.md."""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

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

    @property
    def ratio(self) -> float:
        return self.ours / self.baseline

    def __str__(self) -> str:
        return (
            f"{self.what:<44} {self.ours:>10.4g} {self.unit:<10} {self.baseline_name}: {self.baseline:.4g}   "
            f"ratio {self.ratio:.3f} ({self.better} is better) {self.note}"
        )


def alternate(rounds: int, *sides: Callable[[], float]) -> list[float]:
    """Median of `rounds` measurements of each side, taken in turn so that a busy machine disturbs all alike."""
    taken: list[list[float]] = [[] for _ in sides]
    for round_ in range(rounds):
        order = list(range(len(sides)))
        for index in order if round_ % 2 == 0 else reversed(order):
            taken[index].append(sides[index]())
    return [statistics.median(values) for values in taken]


def seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def keep(name: str, rows: list[Row]) -> None:
    """Put the rows of one benchmark into the results, and write the page again."""
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    results[name] = {"cores": os.cpu_count(), "rows": [asdict(row) | {"ratio": row.ratio} for row in rows]}
    RESULTS.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")
    PAGE.write_text(render(results))


def render(results: dict[str, object]) -> str:
    from benchmarks.run import BENCHMARKS

    environment = Environment(undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, autoescape=False)
    environment.filters["short"] = short
    template = environment.from_string(TEMPLATE.read_text())
    return template.render(results=results, benchmarks=BENCHMARKS) + "\n"


def short(value: float) -> str:
    """Three significant digits, with thousands separated."""
    if value == 0:
        return "0"
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}"
