"""The rollout table of a robot policy, one row per answer, and the batch table, the same rows with advantages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from armature.components.artifacts.tables import IMAGE_REF, TableSchema, read_table, write_table
from armature.components.contracts.images import ImageRef

ROLLOUTS_FILE, BATCH_FILE = "rollouts.parquet", "batch.parquet"
_NUMBERS = pa.list_(pa.float32())
ROLLOUTS = TableSchema(
    "robot-rollouts",
    3,
    pa.schema(
        [
            ("group_id", pa.string()),
            ("episode_id", pa.string()),
            ("suite", pa.string()),
            ("task", pa.int32()),
            ("language", pa.string()),
            ("initial_state", pa.int32()),
            ("chunk", pa.int32()),
            ("policy_version", pa.int32()),
            ("cameras", pa.list_(pa.string())),
            ("images", pa.list_(IMAGE_REF)),
            ("state", _NUMBERS),
            (
                "before",
                _NUMBERS,
            ),  # (T, max_action_dim), of FPO (F, T, max_action_dim); empty where the answer is tokens
            ("after", _NUMBERS),
            ("flow_step", pa.int32()),  # null where no step is drawn
            ("tokens", pa.list_(pa.int32())),  # EOS included; empty where it is not tokens
            ("decoded", pa.bool_()),  # whether the answer says actions
            ("logprobs", pa.list_(pa.float64())),  # (executed, dimensions of the robot), or of each token
            ("actions", _NUMBERS),  # those that were carried out, (executed, dimensions of the robot)
            ("executed", pa.int32()),
            ("reward", pa.float64()),
            ("done", pa.bool_()),
            ("truncated", pa.bool_()),
            ("value", pa.float64()),
            ("last_value", pa.float64()),
        ]
    ),
)
BATCH = TableSchema(
    "robot-batch",
    3,
    pa.schema([*ROLLOUTS.schema, ("advantage", pa.float64()), ("value_target", pa.float64())]),
)

Floats = NDArray[np.float32]


@dataclass(frozen=True, eq=False)
class ActionChunk:
    """One answer of a policy within an episode, and what followed.

    before, after: the points of the drawn denoising step `flow_step`, (T x max_action_dim,) float32; where none is
    drawn (FPO), the noise of the losses, (F x T x max_action_dim,), and the answer, normalized. logprobs: of
    `after`, (executed x dimensions,) float64: actions that were not carried out and dimensions that the robot does
    not have do not count. Of an answer by action tokens these are empty and None, and logprobs are those of its
    `tokens`, (K,) int32, all of which count; `decoded` tells whether they say actions. actions: carried out, in the
    dataset's units. reward: see `rewards.chunk_rewards`. done: the episode ended with it; truncated: because its
    actions were used up. value: of what was seen, None without a value head. last_value: of what was seen after the
    episode's last action, 0 unless a truncated one is to go on with it.
    """

    group_id: str
    episode_id: str
    suite: str
    task: int
    language: str
    initial_state: int
    chunk: int
    policy_version: int
    cameras: tuple[str, ...]
    images: tuple[ImageRef, ...]
    state: Floats
    before: Floats
    after: Floats
    flow_step: int | None
    tokens: NDArray[np.int32]
    decoded: bool
    logprobs: NDArray[np.float64]
    actions: Floats
    executed: int
    reward: float
    done: bool
    truncated: bool
    value: float | None
    last_value: float


@dataclass(frozen=True, eq=False)
class ActionChunkSample(ActionChunk):
    """An answer that is trained on. value_target: what its value is to become, None without a value head."""

    advantage: float
    value_target: float | None


def write_rollouts(folder: Path, answers: Sequence[ActionChunk]) -> None:
    _write(folder / ROLLOUTS_FILE, answers, ROLLOUTS)


def read_rollouts(folder: Path) -> list[ActionChunk]:
    """
    Raises:
        DataError: no rollout table of this version.
    """
    return [ActionChunk(**row) for row in _rows(folder / ROLLOUTS_FILE, ROLLOUTS)]


def write_batch(folder: Path, samples: Sequence[ActionChunkSample]) -> None:
    _write(folder / BATCH_FILE, samples, BATCH)


def read_batch(folder: Path) -> list[ActionChunkSample]:
    """
    Raises:
        DataError: no batch table of this version.
    """
    return [ActionChunkSample(**row) for row in _rows(folder / BATCH_FILE, BATCH)]


def with_advantage(answer: ActionChunk, advantage: float, value_target: float | None = None) -> ActionChunkSample:
    known = {each.name: getattr(answer, each.name) for each in fields(ActionChunk)}
    return ActionChunkSample(**known, advantage=advantage, value_target=value_target)


def _write(path: Path, answers: Sequence[ActionChunk], schema: TableSchema) -> None:
    rows = [vars(answer) | {"images": [asdict(ref) for ref in answer.images]} for answer in answers]
    write_table(path, rows, schema)


def _rows(path: Path, schema: TableSchema) -> list[dict[str, Any]]:
    table = read_table(path, schema)
    arrays = [
        field.name
        for field in schema.schema
        if pa.types.is_list(field.type) and pa.types.is_primitive(field.type.value_type)
    ]
    columns = {name: [np.array(value.values) for value in table[name]] for name in arrays}
    rows: list[dict[str, Any]] = table.drop_columns(arrays).to_pylist()
    for index, row in enumerate(rows):
        row["cameras"] = tuple(row["cameras"])
        row["images"] = tuple(ImageRef(**ref) for ref in row["images"])
        row |= {name: values[index] for name, values in columns.items()}
    return rows
