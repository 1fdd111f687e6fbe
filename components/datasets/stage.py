"""The stage that computes the statistics of a dataset, and the way from its artifact into the dataset."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from components.contracts.errors import DataError
from components.contracts.stages import Artifact, Report, Stage, StageContext
from components.datasets.lerobot.layout import STATS
from components.datasets.measure import Measured, cores, measure_dataset, overall, plan
from components.datasets.page import statistics_report
from components.datasets.settings import QuantileStatsSettings
from components.datasets.source import open_source
from components.datasets.statistics import document
from components.reports.report import write_report


def write_statistics(
    settings: QuantileStatsSettings, inputs: Mapping[str, Artifact], folder: Path, context: StageContext
) -> Report:
    """`stats.json` as LeRobot has it, `episodes.parquet` with each episode's, and `report.html`.

    Raises:
        DataError: the dataset has changed or is damaged, or a value is not finite.
    """
    dataset = open_source(inputs["dataset"].path)
    units = plan(dataset, settings)
    measured = measure_dataset(
        dataset, units, context.machine, lambda done: context.events.progress("statistics", done, len(units))
    )
    whole = overall(dataset, measured, cores(context.machine))
    (folder / "stats.json").write_text(_text(document(whole)))
    pq.write_table(_episodes(measured), folder / "episodes.parquet", compression="zstd")
    write_report(folder / "report.html", statistics_report(dataset, measured, whole, settings.model_dump(mode="json")))
    return Report(rows={"episodes": len(measured.episodes), "frames": dataset.info.total_frames})


QUANTILE_STATS_STAGE = Stage("quantile-stats", 1, QuantileStatsSettings, ("dataset",), write_statistics)


def augment(root: Path, statistics: Path) -> None:
    """Put an artifact's statistics into the dataset at `root`.

    Features that the artifact has none of keep theirs. The file is written beside and renamed: whoever reads it, and
    however this ends, it is the old one or the new one.

    Raises:
        DataError: the dataset's own statistics are no JSON object.
    """
    path = root / STATS
    try:
        old: dict[str, Any] = json.loads(path.read_bytes()) if path.is_file() else {}
        merged = old | json.loads((statistics / "stats.json").read_bytes())
    except (ValueError, TypeError) as error:
        raise DataError(f"not a JSON object: {error}", where=str(path), remedy="remove the file") from error
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".stats-")
    try:
        with os.fdopen(handle, "w") as file:
            file.write(_text(merged))
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).chmod(0o644)
        Path(temporary).rename(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _text(values: Mapping[str, Any]) -> str:
    return json.dumps(values, indent=4, allow_nan=False) + "\n"


def _episodes(measured: Measured) -> pa.Table:
    """One row per episode, columns named as in a dataset's meta/episodes."""
    rows = [
        {"episode_index": index}
        | {f"stats/{name}/{stat}": value for name, each in found.items() for stat, value in each.document().items()}
        for index, found in enumerate(measured.episodes)
    ]
    return pa.Table.from_pylist(rows)
