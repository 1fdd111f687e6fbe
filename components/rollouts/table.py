"""The files of rollouts: `rollouts.parquet` with one row per assistant turn, and `failures.parquet`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from armature.components.artifacts.tables import (
    IMAGE_REF,
    TableSchema,
    packed_array,
    read_table,
    unpacked_array,
    write_table,
)
from armature.components.contracts.images import ImageRef
from armature.components.contracts.rollouts import Failure, GenerateOutputs, Trajectory, Turn
from armature.components.contracts.tool_calls import CalledTool

ROLLOUTS = TableSchema(
    "rollouts",
    5,
    pa.schema(
        [
            ("group_id", pa.string()),
            ("trajectory_id", pa.string()),
            ("environment", pa.string()),
            ("task_id", pa.string()),
            ("split", pa.string()),
            ("truncated", pa.bool_()),
            ("turn", pa.int32()),
            ("policy_version", pa.int32()),
            ("prompt_token_ids", pa.list_(pa.int32())),
            ("completion_token_ids", pa.list_(pa.int32())),
            ("completion_logprobs", pa.list_(pa.float32())),
            ("finish_reason", pa.string()),
            ("images", pa.list_(IMAGE_REF)),
            ("messages", pa.string()),
            ("completion", pa.string()),
            ("reward", pa.float64()),
            ("reward_parts", pa.map_(pa.string(), pa.float64())),
            ("anchor_key", pa.string()),
            ("admissible_key", pa.string()),
            ("action_defect", pa.string()),
            ("generate_seconds", pa.float64()),
            ("environment_seconds", pa.float64()),
            ("experts", pa.binary()),
            ("tool_calls", pa.list_(pa.struct([("name", pa.string()), ("status", pa.string())]))),
        ]
    ),
)

FAILURES_FILE = "failures.parquet"
FAILURES = TableSchema(
    "rollout-failures",
    1,
    pa.schema([(name, pa.string()) for name in ("group_id", "trajectory_id", "task_id", "reason", "detail")]),
)


def write_rollouts(folder: Path, outputs: GenerateOutputs) -> None:
    """Write trajectories and failures, in their order, as two tables into the existing `folder`."""
    turns = [(trajectory, turn) for trajectory in outputs.trajectories for turn in trajectory.turns]
    columns: dict[str, Iterable[Any]] = {
        "turn": [turn.index for _, turn in turns],
        "images": [[asdict(image) for image in turn.images] for _, turn in turns],
        "experts": [packed_array(turn.experts) for _, turn in turns],
        "tool_calls": [[asdict(call) for call in turn.tool_calls] for _, turn in turns],
        "reward_parts": [list(turn.reward_parts.items()) for _, turn in turns],
    }
    for name in ("group_id", "trajectory_id", "environment", "task_id", "split", "truncated"):
        columns[name] = [getattr(trajectory, name) for trajectory, _ in turns]
    for name in ROLLOUTS.schema.names:
        if name not in columns:
            columns[name] = [getattr(turn, name) for _, turn in turns]
    arrays = [pa.array(columns[field.name], field.type) for field in ROLLOUTS.schema]
    write_table(folder / "rollouts.parquet", pa.table(arrays, ROLLOUTS.schema), ROLLOUTS)
    write_failures(folder, outputs.failures)


def read_rollouts(folder: Path, group_id: str | None = None) -> GenerateOutputs:
    """Read the rollouts that `write_rollouts` has written, or one group of them.

    Raises:
        DataError: a table is missing or has another version.
    """
    where = None if group_id is None else {"group_id": group_id}
    table = read_table(folder / "rollouts.parquet", ROLLOUTS, where)
    arrays = {name: _views(table[name]) for name in ("prompt_token_ids", "completion_token_ids", "completion_logprobs")}
    rows = table.drop_columns(list(arrays)).to_pylist()
    for index, row in enumerate(rows):
        row |= {name: views[index] for name, views in arrays.items()}
    trajectories = [_trajectory(list(turns)) for _, turns in groupby(rows, key=lambda row: row["trajectory_id"])]
    return GenerateOutputs(tuple(trajectories), read_failures(folder, where))


def write_failures(folder: Path, failures: Sequence[Failure]) -> None:
    """Write the failed rollouts to the table `failures.parquet` in `folder`."""
    write_table(folder / FAILURES_FILE, [asdict(failure) for failure in failures], FAILURES)


def read_failures(folder: Path, where: dict[str, str] | None = None) -> tuple[Failure, ...]:
    """Read the failed rollouts from `failures.parquet` in `folder`: all rows, or the rows whose columns have the values
    in `where`.

    Raises:
        DataError: the table is missing or has another version.
    """
    return tuple(Failure(**row) for row in read_table(folder / FAILURES_FILE, FAILURES, where).to_pylist())


def _views(column: pa.ChunkedArray) -> list[np.ndarray[Any, Any]]:
    """Return one array for each row of a column of lists. The values are not converted to Python numbers, which would
    be slow."""
    return [
        np.array(chunk.values[start:stop])
        for chunk in column.chunks
        for start, stop in zip(chunk.offsets.to_pylist()[:-1], chunk.offsets.to_pylist()[1:], strict=True)
    ]


def _trajectory(rows: list[dict[str, Any]]) -> Trajectory:
    first = rows[0]
    turns = [
        Turn(
            index=row["turn"],
            images=tuple(ImageRef(**image) for image in row["images"]),
            reward_parts=dict(row["reward_parts"]),
            experts=unpacked_array(row["experts"]),
            tool_calls=tuple(CalledTool(**call) for call in row["tool_calls"]),
            **{name: row[name] for name in _PLAIN},
        )
        for row in rows
    ]
    return Trajectory(
        first["trajectory_id"],
        first["group_id"],
        first["environment"],
        first["task_id"],
        first["split"],
        tuple(turns),
        first["truncated"],
    )


_PLAIN = sorted(set(Turn.__dataclass_fields__) - {"index", "images", "reward_parts", "experts", "tool_calls"})
