"""The stage that computes the statistics of a dataset, and the way from its artifact into the dataset."""

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
from armature.components.datasets.lerobot.layout import STATS, read_stats
from armature.components.datasets.measure import cores, measure_dataset, overall, plan
from armature.components.datasets.measured import Measured, merge
from armature.components.datasets.page import statistics_report
from armature.components.datasets.selection import selection
from armature.components.datasets.settings import QuantileStatsSettings
from armature.components.datasets.source import DatasetSource, counted, open_sources
from armature.components.datasets.statistics import document
from armature.components.reports.report import HtmlReport as Page
from armature.components.reports.report import write_report


def write_statistics(
    settings: QuantileStatsSettings, inputs: Mapping[str, Artifact], folder: Path, context: StageContext
) -> StageReport:
    """`stats.json` as LeRobot has it, `episodes.parquet` with each episode's, and `report.html`.

    Where the datasets have several tags, each tag has these files in `tags/<tag>/`, and `report.html` leads there;
    datasets of one tag are merged.

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
    return StageReport(rows=counted(sources))


QUANTILE_STATS_STAGE = Stage("quantile-stats", 4, QuantileStatsSettings, ("dataset",), write_statistics)


def read_statistics(artifact: Path, tags: Sequence[str]) -> dict[str, dict[str, Any]]:
    """stats.json of each of the datasets' tags.

    Raises:
        DataError: the artifact has none for a tag.
    """
    found = {}
    for tag, home in _homes(artifact, tags).items():
        try:
            found[tag] = json.loads((home / "stats.json").read_bytes())
        except FileNotFoundError as error:
            raise DataError(
                f"there are no statistics for {tag!r}",
                code="statistics_missing",
                where=str(home),
                remedy="compute them of the same dataset artifact that is trained on",
            ) from error
    return found


def _measured(
    sources: Sequence[DatasetSource], settings: QuantileStatsSettings, context: StageContext
) -> list[Measured]:
    """Of each source; one bar for all."""
    plans = [plan(source.dataset, settings, source.episodes) for source in sources]
    ends = list(accumulate(len(units) for units in plans))

    def report(before: int, done: int) -> None:
        context.events.progress("statistics", before + done, ends[-1])

    return [
        measure_dataset(source.dataset, units, context.machine, partial(report, end - len(units)))
        for source, units, end in zip(sources, plans, ends, strict=True)
    ]


def _homes(artifact: Path, tags: Sequence[str]) -> dict[str, Path]:
    """Where the statistics of each tag are."""
    if len(set(tags)) == 1:
        return {tags[0]: artifact}
    return {tag: artifact / "tags" / tag for tag in dict.fromkeys(tags)}


def augment(root: Path, statistics: Path) -> None:
    """Put an artifact's statistics into the dataset at `root`.

    Features that the artifact has none of keep theirs. The file is written beside and renamed: whoever reads it, and
    however this ends, it is the old one or the new one.

    Raises:
        DataError: the dataset's own statistics are not a JSON object of finite numbers.
    """
    path = root / STATS
    old = read_stats(path) if path.is_file() else {}
    write_file(path, _text(old | read_stats(statistics / "stats.json")).encode())


def _text(values: Mapping[str, Any]) -> str:
    return json.dumps(values, indent=4, allow_nan=False) + "\n"


def _episodes(chosen: Mapping[int, Sequence[int]], measured: Measured) -> pa.Table:
    """One row per episode, columns named as in a dataset's meta/episodes; `chosen` are the episodes of each source."""
    sources = np.repeat(list(chosen), [len(episodes) for episodes in chosen.values()])
    indices = np.concatenate([selection(episodes).numbers() for episodes in chosen.values()])
    table = measured.episodes.combine_chunks()
    return table.add_column(0, "episode_index", pa.array(indices)).add_column(0, "source", pa.array(sources))
