"""Statistics of a dataset as a page: how each number is spread, and what will be scaled by."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence

import numpy as np

from armature.components.contracts.images import data_url
from armature.components.datasets.histograms import Histogram
from armature.components.datasets.lerobot.reader import Dataset
from armature.components.datasets.measured import Measured
from armature.components.datasets.quantiles import FeatureValues
from armature.components.datasets.statistics import QUANTILES, Array, FeatureStatistics
from armature.components.reports.report import HtmlReport, ReportImage, Table

COLUMNS, BINS = 4, 60
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
    drawn = [_image(name, *_columns(measured.values[name])) for name in whole if name in measured.values]
    drawn += [_image(name, *_channels(measured.histograms[name])) for name in whole if name in measured.histograms]
    names = ["feature", "mean", "std", "min", *QUANTILES, "max"]
    rows = [row for name, each in whole.items() for row in _rows(name, each)]
    return HtmlReport("Statistics", figures, {}, drawn, [Table("By feature", names, rows)], settings)


def _rows(name: str, statistics: FeatureStatistics) -> list[list[str]]:
    columns = [statistics.mean, statistics.std, statistics.min, *statistics.quantiles, statistics.max]
    flat = np.stack([np.ravel(column) for column in columns], axis=1)[:SHOWN]
    titles = [name] if len(flat) == 1 else [f"{name}[{i}]" for i in range(len(flat))]
    return [[title, *(f"{value:.5g}" for value in row)] for title, row in zip(titles, flat, strict=True)]


def _columns(values: FeatureValues) -> tuple[list[Array], list[Array]]:
    """Counts and edges of each column."""
    counts, edges = [], []
    for row in range(min(SHOWN, len(values.mean))):
        count, edge = np.histogram(np.concatenate([part[row] for part in values.parts]).astype(np.float64), BINS)
        counts.append(count)
        edges.append(edge)
    return counts, edges


def _channels(histogram: Histogram) -> tuple[list[Array], list[Array]]:
    edges = np.arange(257) / 256
    return list(histogram.counts), [edges] * len(histogram.counts)


def _image(name: str, counts: list[Array], edges: list[Array]) -> ReportImage:
    """A panel per column; the same statistics give the same bytes."""
    from matplotlib.figure import Figure

    wide = min(COLUMNS, len(counts))
    high = math.ceil(len(counts) / wide)
    figure = Figure(figsize=(2.6 * wide, 1.8 * high), layout="constrained")
    axes = list(figure.subplots(high, wide, squeeze=False).flat)
    for number, (axis, count, edge) in enumerate(zip(axes, counts, edges, strict=False)):
        axis.stairs(count, edge, fill=True, color="#3f7fc1")
        axis.set_title(f"[{number}]", fontsize=8, loc="left")
        axis.tick_params(labelsize=7)
        axis.set_yticks([])
    for axis in axes[len(counts) :]:
        axis.set_visible(False)
    out = io.BytesIO()
    figure.savefig(out, format="png", dpi=90, facecolor="white", metadata={"Software": None})
    spans = (f"[{i}] from {edge[0]:.4g} to {edge[-1]:.4g}" for i, edge in enumerate(edges))
    return ReportImage(name, data_url(out.getvalue(), "image/png"), "; ".join(spans))
