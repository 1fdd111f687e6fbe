"""Statistics of a dataset as a page: how each number is spread, and what will be scaled by."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from armature.components.datasets.histograms import Histogram
from armature.components.datasets.lerobot.reader import Dataset
from armature.components.datasets.measured import Measured
from armature.components.datasets.quantiles import FeatureValues
from armature.components.datasets.statistics import QUANTILES, FeatureStatistics
from armature.components.reports.curves import Curves, Panel
from armature.components.reports.report import HtmlReport, Table

CHANNELS, BINS = ("red", "green", "blue"), 60
SHOWN = 32
"""Most columns of a feature that are drawn."""


def statistics_report(
    datasets: Sequence[Dataset], measured: Measured, whole: dict[str, FeatureStatistics], settings: dict[str, object]
) -> HtmlReport:
    figures = {
        "datasets": f"{len(datasets):,}",
        "episodes": f"{measured.episodes.num_rows:,}",
        "frames": f"{max(each.count for each in whole.values()):,}",
        "frames per second": ", ".join(sorted({f"{dataset.info.fps:g}" for dataset in datasets})),
        "tasks": f"{len({task for dataset in datasets for task in dataset.tasks.values()}):,}",
    }
    curves = [each for name in whole if name in measured.values for each in _columns(name, measured.values[name])]
    curves += [_channels(name, measured.histograms[name]) for name in whole if name in measured.histograms]
    names = ["feature", "mean", "std", "min", *QUANTILES, "max"]
    rows = [row for name, each in whole.items() for row in _rows(name, each)]
    table = Table("By feature", names, rows)
    return HtmlReport("Statistics", figures, tables=[table], configuration=settings, curves=curves)


def _rows(name: str, statistics: FeatureStatistics) -> list[list[str]]:
    columns = [statistics.mean, statistics.std, statistics.min, *statistics.quantiles, statistics.max]
    flat = np.stack([np.ravel(column) for column in columns], axis=1)[:SHOWN]
    titles = [name] if len(flat) == 1 else [f"{name}[{i}]" for i in range(len(flat))]
    return [[title, *(f"{value:.5g}" for value in row)] for title, row in zip(titles, flat, strict=True)]


def _columns(name: str, values: FeatureValues) -> list[Curves]:
    """Return one histogram for each column."""
    curves = []
    for row in range(min(SHOWN, len(values.mean))):
        counts, edges = np.histogram(np.concatenate([part[row] for part in values.parts]).astype(np.float64), BINS)
        bins = [
            {"step": float(at), "count": int(n)} for at, n in zip((edges[:-1] + edges[1:]) / 2, counts, strict=True)
        ]
        curves.append(Curves([Panel(f"{name}[{row}]", ("count",), axis="value")], bins))
    return curves


def _channels(name: str, histogram: Histogram) -> Curves:
    """Return the histograms of the three channels in one chart."""
    rows = [
        {"step": value, **dict(zip(CHANNELS, map(int, counts), strict=True))}
        for value, counts in enumerate(histogram.counts.T)
    ]
    return Curves([Panel(name, CHANNELS, axis="value")], rows)
