"""Build the samples of one training step from rollouts, check them, and store them as a table."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

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
from armature.components.contracts.batches import Sample, TeacherScores, TurnAdvantages
from armature.components.contracts.errors import DataError
from armature.components.contracts.images import ImageRef
from armature.components.contracts.metrics import merged
from armature.components.contracts.rollouts import MAX_LOGPROB, GenerateOutputs
from armature.components.rollouts.batches.advantages import turn_advantages
from armature.components.rollouts.settings import BatchSettings

Vocabulary = tuple[int, int]
"""Two counts: the token ids that can be sampled, and the token ids that a sequence can contain."""
MOST_TOKENS = 2**31
_KINDS = {"input_ids": "iu", "loss_mask": "b", "behavior_logprobs": "f", "policy_versions": "iu", "advantages": "f"}


def sample_defect(sample: Sample, vocabulary: Vocabulary = (MOST_TOKENS, MOST_TOKENS)) -> tuple[str, str] | None:
    """Return the name of a sample's first invalid field and the reason; None if the sample can be trained on."""
    length = np.shape(sample.input_ids)
    for name, kinds in _KINDS.items():
        values = getattr(sample, name)
        if not isinstance(values, np.ndarray) or values.dtype.kind not in kinds:
            return name, f"holds {getattr(values, 'dtype', type(values).__name__)}"
        if values.ndim != 1 or values.shape != length or not len(values):
            return name, f"has shape {values.shape}, input_ids has {length}"
    if sample.experts is not None and (sample.experts.dtype != np.int16 or sample.experts.shape[:1] != length):
        return "experts", f"has {sample.experts.dtype} of shape {sample.experts.shape}, input_ids has {length}"
    mask, ids = sample.loss_mask, sample.input_ids
    if (teacher := sample.teacher) is not None:
        if teacher.logprobs.shape != (mask.sum(),) or teacher.ids.shape != teacher.likeliest.shape:
            return "teacher", f"has {teacher.logprobs.shape} and {teacher.ids.shape} for {mask.sum()} trained tokens"
        if lost := int((~np.isfinite(teacher.logprobs)).sum() + (~np.isfinite(teacher.likeliest)).sum()):
            return "teacher", f"gives {lost} log-probs that are not finite"
    for bound, tokens in zip(vocabulary, (ids[mask], ids), strict=True):
        strange = tokens[(tokens < 0) | (tokens >= bound)]
        if len(strange):
            return "input_ids", f"{int(strange[0])} is not a token id from 0 to {bound - 1}"
    if mask[0]:
        return "loss_mask", "is set on the first token, which nothing predicts"
    for name in ("behavior_logprobs", "advantages"):
        lost = int((~np.isfinite(getattr(sample, name)[mask])).sum())
        if lost:
            return name, f"of {lost} trained tokens are not finite"
    highest = sample.behavior_logprobs[mask].max(initial=-np.inf)
    if highest > MAX_LOGPROB:
        return "behavior_logprobs", f"{highest:.4g} is not a log-probability"
    return None if np.isfinite(sample.reward) else ("reward", f"is {sample.reward}")


def check_samples(
    samples: Sequence[Sample], vocabulary: Vocabulary = (MOST_TOKENS, MOST_TOKENS), where: str = "the batch"
) -> None:
    """Check that all samples can be trained on; see `sample_defect`.

    Raises:
        DataError: a sample is invalid. The error names batch, row and field.
    """
    for row, sample in enumerate(samples):
        if defect := sample_defect(sample, vocabulary):
            raise refusal(f"{defect[0]} {defect[1]}", where, row, sample)


def refusal(what: str, where: str, row: int, sample: Sample) -> DataError:
    """Return the error for a sample that cannot be trained on. `what` is the reason, and `row` its row in the batch
    `where`."""
    return DataError(
        what,
        code="sample_not_trainable",
        where=f"{where}, row {row}, sample {sample.sample_id}",
        remedy="correct the program that wrote it; machine.skip_batches = [N] continues a run without step N's batch",
    )


# --- Building a batch ---

log = logging.getLogger(__name__)


class SampleSource(Protocol):
    """The part of a model family's adapter that batches need. It turns trajectories into samples, and counts dropped
    turns by reason."""

    def samples(
        self, outputs: GenerateOutputs, advantages: TurnAdvantages | None = None
    ) -> tuple[list[Sample], Counter[str]]: ...


SampleT = TypeVar("SampleT")


@dataclass(frozen=True)
class BuiltBatch(Generic[SampleT]):
    """The samples that a step trains on. `drops` counts, by reason, what was left out of them; `metrics` are numbers
    about the step's groups and samples."""

    samples: Sequence[SampleT]
    drops: Counter[str]
    metrics: dict[str, float]

    def write(self: BuiltBatch[Sample], folder: Path) -> Path:
        """Write the samples to a new folder, as the Parquet file that trainers read, and return that folder."""
        folder.mkdir(parents=True)
        write_batch(folder, self.samples)
        return folder


def build_batch(
    outputs: GenerateOutputs,
    adapter: SampleSource,
    settings: BatchSettings,
    vocabulary: Vocabulary = (MOST_TOKENS, MOST_TOKENS),
) -> BuiltBatch[Sample]:
    """Build the batch of a step. In its samples, all tokens sampled in a turn have the turn's advantage.

    Invalid samples are dropped; see `sample_defect`.
    """
    advantages = turn_advantages(outputs.trajectories, settings)
    samples, drops = adapter.samples(outputs, advantages.by_turn)
    valid = []
    for sample in samples:
        if settings.skip_zero_advantage and sample.group_id in advantages.without_gradient:
            drops["zero_advantage_group"] += 1
        elif defect := sample_defect(sample, vocabulary):
            drops[f"bad_{defect[0]}"] += 1
            log.warning("sample %s is left out: %s %s", sample.sample_id, *defect)
        else:
            valid.append(sample)
    counts = {"samples/count": float(len(valid)), "samples/dropped": float(drops.total())}
    return BuiltBatch(valid, drops, merged(advantages=advantages.metrics, samples=counts))


BATCH_FILE = "batch.parquet"
BATCH_SCHEMA = TableSchema(
    "batch",
    3,
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
            ("experts", pa.binary()),
            ("teacher_logprobs", pa.binary()),
            ("teacher_ids", pa.binary()),
            ("teacher_likeliest", pa.binary()),
        ]
    ),
)
_PER_TOKEN = ("input_ids", "loss_mask", "behavior_logprobs", "policy_versions", "advantages")
_TEACHER = ("logprobs", "ids", "likeliest")
_PER_SAMPLE = ("sample_id", "group_id", "trajectory_id", "reward")


def write_batch(folder: Path, samples: Sequence[Sample]) -> None:
    """Write the table of `samples`, in their order, to `folder`."""
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
    columns["experts"] = pa.array([packed_array(sample.experts) for sample in samples], pa.binary())
    for name in _TEACHER:
        arrays = [getattr(sample.teacher, name, None) for sample in samples]
        columns[f"teacher_{name}"] = pa.array(map(packed_array, arrays), pa.binary())
    table = pa.table([columns[name] for name in BATCH_SCHEMA.schema.names], schema=BATCH_SCHEMA.stored)
    write_table(folder / BATCH_FILE, table, BATCH_SCHEMA)


def read_batch(folder: Path, group_id: str | None = None) -> list[Sample]:
    """Read the samples of the table in `folder`, in their order: all of them, or one group.

    Raises:
        DataError: the table is missing, has another version or lacks values.
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
    for name in (*_PER_SAMPLE, "images", "experts"):
        columns[name] = table.column(name).to_pylist()
    columns["images"] = [tuple(ImageRef(**row) for row in rows) for rows in columns["images"]]
    columns["experts"] = [unpacked_array(data) for data in columns["experts"]]
    scores = zip(*(map(unpacked_array, table.column(f"teacher_{name}").to_pylist()) for name in _TEACHER), strict=True)
    columns["teacher"] = [None if one[0] is None else TeacherScores(*one) for one in scores]
    return [Sample(**{name: column[row] for name, column in columns.items()}) for row in range(table.num_rows)]


def _image_row(ref: ImageRef) -> dict[str, object]:
    return {"sha256": ref.sha256, "media_type": ref.media_type, "width": ref.width, "height": ref.height}
