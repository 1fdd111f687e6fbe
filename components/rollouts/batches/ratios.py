"""What the trainer computed of the tokens of one step, beside what the sampler did: one row per training sample."""

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
    """Where the run in folder `workspace` keeps those of `step`."""
    return workspace / RATIOS_FOLDER / f"{step:05d}.parquet"


def write_log_ratios(path: Path, samples: Sequence[Sample], log_ratios: Mapping[int, LogRatios]) -> None:
    """
    Args:
        log_ratios: by the samples' position, (T,) log-prob under the trainer less that under the sampler of the T
            tokens that were trained on; samples without any are left out.

    Raises:
        OSError: what is at `path` is as it was then.
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
    part = path.with_suffix(".part")  # what a killed trainer leaves is written over when the step is made again
    write_table(part, pa.table(columns, LOG_RATIOS.schema), LOG_RATIOS)
    part.replace(path)


def read_log_ratios(path: Path, group_id: str | None = None) -> dict[str, LogRatios]:
    """By sample id, of all samples or of those of one group; see `write_log_ratios`.

    Raises:
        DataError: no readable table of this version.
    """
    table = read_table(path, LOG_RATIOS, None if group_id is None else {"group_id": group_id})
    names, lists = table["sample_id"].to_pylist(), table["log_ratios"].combine_chunks()
    ends = np.cumsum(lists.value_lengths().to_numpy(zero_copy_only=False))
    flat = lists.flatten().to_numpy(zero_copy_only=False)
    return dict(zip(names, np.split(flat, ends[:-1]), strict=True)) if names else {}


# What the trainer knows of the tokens of a step, for the pages that show its rollouts.


def read_scores(
    trajectories: Sequence[Trajectory], batch: Path, log_ratios: Path, group_id: str | None = None
) -> dict[str, list[TurnScores]]:
    """Those of the batch in a folder, or of one group of it; without ratios where their file is absent or damaged.

    Raises:
        DataError: the batch cannot be read.
    """
    known: Mapping[str, LogRatios] = {}
    with suppress(DataError):
        known = read_log_ratios(log_ratios, group_id)
    return turn_scores(trajectories, read_batch(batch, group_id), known)
