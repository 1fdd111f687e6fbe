"""Tables of robot rollouts: the rollout table has one row per action chunk, the batch table adds advantages."""

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
    4,
    pa.schema(
        [
            ("group_id", pa.string()),
            ("episode_id", pa.string()),
            ("suite", pa.string()),
            ("task", pa.int32()),
            ("language", pa.string()),
            ("initial_state", pa.int32()),
            ("perturbation", pa.string()),  # empty without one
            ("chunk", pa.int32()),
            ("policy_version", pa.int32()),
            ("cameras", pa.list_(pa.string())),
            ("images", pa.list_(IMAGE_REF)),
            ("state", _NUMBERS),
            ("before", _NUMBERS),  # (T, max_action_dim), with FPO (F, T, max_action_dim); empty for action tokens
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
    4,
    pa.schema([*ROLLOUTS.schema, ("advantage", pa.float64()), ("value_target", pa.float64())]),
)

Floats = NDArray[np.float32]


@dataclass(frozen=True, eq=False)
class ActionChunk:
    """One action chunk that a policy answered in an episode, and what happened next.

    perturbation: the label of the episode's perturbation; empty without one.
    before, after: for Flow-SDE the points before and after the sampled denoising step `flow_step`, each (T x
        max_action_dim,) float32. For FPO, which samples no step, the noises of the losses, (F x T x max_action_dim,),
        and the normalized chunk. Empty for action tokens.
    tokens: the sampled action tokens including EOS, (K,) int32; empty for continuous actions.
    decoded: False if the tokens could not be decoded to actions.
    logprobs: float64. Continuous: of `after`, (executed x dimensions,); actions that were not executed and dimensions
        that the robot does not have are left out. Tokens: of every token, (K,).
    actions: the executed actions, in the dataset's units.
    reward: see `chunk_rewards`.
    done: this chunk ended the episode. truncated: it did so because the episode ran out of actions.
    value: value of the observation, None without a value head.
    last_value: value of the observation after the episode's last action; 0 unless a truncated episode is bootstrapped.
    """

    group_id: str
    episode_id: str
    suite: str
    task: int
    language: str
    initial_state: int
    perturbation: str
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
    """A chunk to train on. value_target: the value that the value head should learn, None without a value head."""

    advantage: float
    value_target: float | None


def write_rollouts(folder: Path, answers: Sequence[ActionChunk]) -> None:
    """Write the rollout table into `folder`."""
    _write(folder / ROLLOUTS_FILE, answers, ROLLOUTS)


def read_rollouts(folder: Path) -> list[ActionChunk]:
    """Read the rollout table of `folder`.

    Raises:
        DataError: there is no rollout table, or it has another version.
    """
    return [ActionChunk(**row) for row in _rows(folder / ROLLOUTS_FILE, ROLLOUTS)]


def write_batch(folder: Path, samples: Sequence[ActionChunkSample]) -> None:
    """Write the batch table into `folder`."""
    _write(folder / BATCH_FILE, samples, BATCH)


def read_batch(folder: Path) -> list[ActionChunkSample]:
    """Read the batch table of `folder`.

    Raises:
        DataError: there is no batch table, or it has another version.
    """
    return [ActionChunkSample(**row) for row in _rows(folder / BATCH_FILE, BATCH)]


def with_advantage(answer: ActionChunk, advantage: float, value_target: float | None = None) -> ActionChunkSample:
    """Return the chunk as a training sample with this advantage and value target."""
    values = {each.name: getattr(answer, each.name) for each in fields(ActionChunk)}
    return ActionChunkSample(**values, advantage=advantage, value_target=value_target)


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
