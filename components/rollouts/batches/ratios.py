"""The table of log-ratios of a step: per trained token, the trainer's log-prob minus the sampler's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
import pyarrow as pa

from armature.components.artifacts.tables import TableSchema, read_table, write_table
from armature.components.contracts.batches import LogRatios, Sample
from armature.components.contracts.errors import DataError
from armature.components.contracts.rollouts import Trajectory
from armature.components.pages.records import TurnScores, turn_scores
from armature.components.rollouts.batches.table import read_batch

RATIOS_FOLDER = "log_ratios"
LOG_RATIOS = TableSchema(
    "log-ratios",
    1,
    pa.schema(
        [
            ("sample_id", pa.string()),
            ("group_id", pa.string()),
            ("trajectory_id", pa.string()),
            ("log_ratios", pa.list_(pa.float32())),
        ]
    ),
)


def ratios_file(workspace: Path, step: int) -> Path:
    """Return the path of the table with the log-ratios of `step`, in the run's workspace folder."""
    return workspace / RATIOS_FOLDER / f"{step:05d}.parquet"


def write_log_ratios(path: Path, samples: Sequence[Sample], log_ratios: Mapping[int, LogRatios]) -> None:
    """Write the log-ratios of a step atomically.

    Args:
        log_ratios: maps the index of a sample in `samples` to an array (T,): for each of its T trained tokens, the
            log-prob under the trainer minus the log-prob under the sampler. Samples without trained tokens are left
            out.

    Raises:
        OSError: the file cannot be written; an earlier file at `path` is unchanged.
    """
    rows = sorted(log_ratios)
    columns: dict[str, pa.Array] = {
        name: pa.array([getattr(samples[row], name) for row in rows], pa.string())
        for name in ("sample_id", "group_id", "trajectory_id")
    }
    values = [log_ratios[row] for row in rows]
    offsets = np.cumsum([0, *map(len, values)], dtype=np.int32)
    flat = np.concatenate(values) if values else np.empty(0, np.float32)
    columns["log_ratios"] = pa.ListArray.from_arrays(offsets, pa.array(flat, pa.float32()))
    path.parent.mkdir(exist_ok=True)
    part = path.with_suffix(".part")  # a killed trainer may leave this file; the repeated step overwrites it
    write_table(part, pa.table(columns, LOG_RATIOS.schema), LOG_RATIOS)
    part.replace(path)


def read_log_ratios(path: Path, group_id: str | None = None) -> dict[str, LogRatios]:
    """Read the log-ratios that `write_log_ratios` has written, by sample id, for all samples or for one group.

    Raises:
        DataError: the table is missing, damaged or has another version.
    """
    table = read_table(path, LOG_RATIOS, None if group_id is None else {"group_id": group_id})
    names, lists = table["sample_id"].to_pylist(), table["log_ratios"].combine_chunks()
    ends = np.cumsum(lists.value_lengths().to_numpy(zero_copy_only=False))
    flat = lists.flatten().to_numpy(zero_copy_only=False)
    return dict(zip(names, np.split(flat, ends[:-1]), strict=True)) if names else {}


def read_scores(
    trajectories: Sequence[Trajectory], batch: Path, log_ratios: Path, group_id: str | None = None
) -> dict[str, list[TurnScores]]:
    """Return the scores of each trajectory's turns, by trajectory id, for the pages that show rollouts.

    The scores have no log-ratios if the file `log_ratios` is missing or damaged.

    Args:
        batch: folder with the table of the step's samples.
        group_id: read only this group of the tables; None: all groups.

    Raises:
        DataError: the batch cannot be read.
    """
    ratios: Mapping[str, LogRatios] = {}
    with suppress(DataError):
        ratios = read_log_ratios(log_ratios, group_id)
    return turn_scores(trajectories, read_batch(batch, group_id), ratios)
