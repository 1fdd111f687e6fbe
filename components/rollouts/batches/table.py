"""The batch table: one row per training sample, unpadded; pixels stay in the image store."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from armature.components.artifacts.tables import IMAGE_REF, TableSchema, read_table, write_table
from armature.components.contracts.batches import Sample
from armature.components.contracts.errors import DataError
from armature.components.contracts.images import ImageRef

BATCH_FILE = "batch.parquet"
BATCH_SCHEMA = TableSchema(
    "batch",
    1,
    pa.schema(
        [
            ("sample_id", pa.string()),
            ("group_id", pa.string()),
            ("trajectory_id", pa.string()),
            ("input_ids", pa.list_(pa.int32())),
            ("loss_mask", pa.list_(pa.bool_())),
            ("behavior_logprobs", pa.list_(pa.float32())),
            ("policy_versions", pa.list_(pa.int32())),
            ("advantages", pa.list_(pa.float32())),
            ("reward", pa.float64()),
            ("images", pa.list_(IMAGE_REF)),
        ]
    ),
)
_PER_TOKEN = ("input_ids", "loss_mask", "behavior_logprobs", "policy_versions", "advantages")
_PER_SAMPLE = ("sample_id", "group_id", "trajectory_id", "reward")


def write_batch(folder: Path, samples: Sequence[Sample]) -> None:
    """Write `samples` in their order to `folder`."""
    columns: dict[str, pa.Array] = {}
    offsets = np.cumsum([0, *(len(sample.input_ids) for sample in samples)], dtype=np.int32)
    for name in _PER_TOKEN:
        values = [getattr(sample, name) for sample in samples]
        kind = BATCH_SCHEMA.schema.field(name).type.value_type
        flat = pa.array(np.concatenate(values) if values else np.array([]), type=kind)
        columns[name] = pa.ListArray.from_arrays(offsets, flat)
    for name in _PER_SAMPLE:
        columns[name] = pa.array([getattr(sample, name) for sample in samples], BATCH_SCHEMA.schema.field(name).type)
    columns["images"] = pa.array(
        [[_image_row(ref) for ref in sample.images] for sample in samples],
        BATCH_SCHEMA.schema.field("images").type,
    )
    table = pa.table([columns[name] for name in BATCH_SCHEMA.schema.names], schema=BATCH_SCHEMA.stored)
    write_table(folder / BATCH_FILE, table, BATCH_SCHEMA)


def read_batch(folder: Path, group_id: str | None = None) -> list[Sample]:
    """The samples in `folder`, in their order, or those of one group.

    Raises:
        DataError: no batch table of this version.
    """
    table = read_table(folder / BATCH_FILE, BATCH_SCHEMA, None if group_id is None else {"group_id": group_id})
    columns: dict[str, Any] = {}
    for name in _PER_TOKEN:
        lists = table.column(name).combine_chunks()
        if lists.null_count or lists.flatten().null_count:
            raise DataError(
                f"{name} has values that are missing",
                code="batch_values_missing",
                where=str(folder / BATCH_FILE),
                remedy="skip the batch",
            )
        flat = lists.flatten().to_numpy(zero_copy_only=False)
        columns[name] = np.split(flat, np.cumsum(lists.value_lengths().to_numpy(zero_copy_only=False))[:-1])
    for name in (*_PER_SAMPLE, "images"):
        columns[name] = table.column(name).to_pylist()
    columns["images"] = [tuple(ImageRef(**row) for row in rows) for rows in columns["images"]]
    return [Sample(**{name: column[row] for name, column in columns.items()}) for row in range(table.num_rows)]


def _image_row(ref: ImageRef) -> dict[str, object]:
    return {"sha256": ref.sha256, "media_type": ref.media_type, "width": ref.width, "height": ref.height}
