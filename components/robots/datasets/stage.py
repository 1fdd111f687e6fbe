"""The stage quantile-stats: it computes statistics of datasets; and the step that puts them into a dataset."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from armature.components.artifacts.disk import write_file
from armature.components.contracts.errors import DataError
from armature.components.contracts.stages import Artifact, Stage, StageContext, StageReport
from armature.components.pages.report import Curves, HtmlReport, Panel, Table, write_report
from armature.components.pages.report import HtmlReport as Page
from armature.components.robots.datasets.histograms import Histogram
from armature.components.robots.datasets.lerobot.layout import STATS, read_stats
from armature.components.robots.datasets.lerobot.reader import Dataset
from armature.components.robots.datasets.measure import Measured, cores, measure_dataset, merge, overall, plan
from armature.components.robots.datasets.quantiles import QUANTILES, FeatureStatistics, FeatureValues, document
from armature.components.robots.datasets.settings import QuantileStatsSettings
from armature.components.robots.datasets.source import DatasetSource, open_sources, selection

# --- Report: the distribution of each number, and the statistics it is normalized with ---

CHANNELS, BINS = ("red", "green", "blue"), 60
SHOWN = 32
"""Maximum number of columns of a feature in the report."""


def statistics_report(
    datasets: Sequence[Dataset], measured: Measured, whole: dict[str, FeatureStatistics], settings: dict[str, object]
) -> HtmlReport:
    """Return the report with a histogram of each number and a table of statistics."""
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
    """Return one histogram for each column of a feature."""
    curves = []
    for row in range(min(SHOWN, len(values.mean))):
        counts, edges = np.histogram(np.concatenate([part[row] for part in values.parts]).astype(np.float64), BINS)
        bins = [
            {"step": float(at), "count": int(n)} for at, n in zip((edges[:-1] + edges[1:]) / 2, counts, strict=True)
        ]
        curves.append(Curves([Panel(f"{name}[{row}]", ("count",), axis="value")], bins))
    return curves


def _channels(name: str, histogram: Histogram) -> Curves:
    """Return the histograms of an image's three channels in one chart."""
    rows = [
        {"step": value, **dict(zip(CHANNELS, map(int, counts), strict=True))}
        for value, counts in enumerate(histogram.counts.T)
    ]
    return Curves([Panel(name, CHANNELS, axis="value")], rows)


def write_statistics(
    settings: QuantileStatsSettings, inputs: Mapping[str, Artifact], folder: Path, context: StageContext
) -> StageReport:
    """Compute the statistics of the datasets; write `stats.json`, `episodes.parquet` and `report.html`.

    `stats.json` has LeRobot's format, `episodes.parquet` the statistics of each episode. Datasets with the same tag are
    merged. If there are several tags, each has these files in `tags/<tag>/`, and `report.html` links to them.

    Raises:
        DataError: a dataset has changed or is damaged, or a value is not finite.
    """
    sources = open_sources(inputs["dataset"].path)
    measured = _measured(sources, settings, context)
    homes = _homes(folder, [source.tag for source in sources])
    for tag, home in homes.items():
        numbers = [number for number, source in enumerate(sources) if source.tag == tag]
        datasets = [sources[number].dataset for number in numbers]
        merged = merge([measured[number] for number in numbers])
        whole = overall(datasets[0], merged, cores(context.machine))
        home.mkdir(parents=True, exist_ok=True)
        (home / "stats.json").write_text(_text(document(whole)))
        episodes = _episodes({number: sources[number].episodes for number in numbers}, merged)
        pq.write_table(episodes, home / "episodes.parquet", compression="zstd")
        write_report(home / "report.html", statistics_report(datasets, merged, whole, settings.model_dump(mode="json")))
    if len(homes) > 1:
        links = {tag: f"{home.relative_to(folder).as_posix()}/report.html" for tag, home in homes.items()}
        write_report(folder / "report.html", Page("Statistics", {"datasets": f"{len(sources):,}"}, links))
    frames = sum(int(selection(source.episodes).frames(source.dataset.episodes).stops[-1]) for source in sources)
    return StageReport(rows={"episodes": sum(len(source.episodes) for source in sources), "frames": frames})


QUANTILE_STATS_STAGE = Stage("quantile-stats", 5, QuantileStatsSettings, ("dataset",), write_statistics)


def read_statistics(artifact: Path, tags: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return the content of stats.json for each tag of the datasets.

    Raises:
        DataError: the artifact has no statistics for a tag.
    """
    by_tag = {}
    for tag, home in _homes(artifact, tags).items():
        try:
            by_tag[tag] = json.loads((home / "stats.json").read_bytes())
        except FileNotFoundError as error:
            raise DataError(
                f"there are no statistics for {tag!r}",
                code="statistics_missing",
                where=str(home),
                remedy="compute the statistics of the dataset artifact that is used for training",
            ) from error
    return by_tag


def _measured(
    sources: Sequence[DatasetSource], settings: QuantileStatsSettings, context: StageContext
) -> list[Measured]:
    """Return the measurements of each source, with one progress bar for all of them."""
    plans = [plan(source.dataset, settings, source.episodes, source.frame_weights) for source in sources]
    ends = list(accumulate(len(units) for units in plans))

    def report(before: int, done: int) -> None:
        context.events.progress("statistics", before + done, ends[-1])

    return [
        measure_dataset(source.dataset, units, context.machine, partial(report, end - len(units)))
        for source, units, end in zip(sources, plans, ends, strict=True)
    ]


def _homes(artifact: Path, tags: Sequence[str]) -> dict[str, Path]:
    """Return the folder of each tag's statistics."""
    if len(set(tags)) == 1:
        return {tags[0]: artifact}
    return {tag: artifact / "tags" / tag for tag in dict.fromkeys(tags)}


def augment(root: Path, statistics: Path) -> None:
    """Put an artifact's statistics into the dataset at `root`.

    Features without statistics in the artifact keep their old ones. The file is replaced atomically: readers see the
    old or the new one, even if this process dies.

    Raises:
        DataError: the dataset's statistics are not a JSON object of finite numbers.
    """
    path = root / STATS
    old = read_stats(path) if path.is_file() else {}
    write_file(path, _text(old | read_stats(statistics / "stats.json")).encode())


def _text(values: Mapping[str, Any]) -> str:
    return json.dumps(values, indent=4, allow_nan=False) + "\n"


def _episodes(chosen: Mapping[int, Sequence[int]], measured: Measured) -> pa.Table:
    """Return a table with one row per episode and columns named as in a dataset's meta/episodes.

    chosen: the episodes of each source, by the source's number.
    """
    sources = np.repeat(list(chosen), [len(episodes) for episodes in chosen.values()])
    indices = np.concatenate([selection(episodes).numbers() for episodes in chosen.values()])
    table = measured.episodes.combine_chunks()
    return table.add_column(0, "episode_index", pa.array(indices)).add_column(0, "source", pa.array(sources))
