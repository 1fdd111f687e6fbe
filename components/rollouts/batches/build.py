"""What a sample must be before anything is trained on it."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import numpy as np

from armature.components.contracts.batches import Sample, TurnAdvantages
from armature.components.contracts.errors import DataError
from armature.components.contracts.metrics import merged
from armature.components.contracts.rollouts import GenerateOutputs
from armature.components.rollouts.batches.advantages import turn_advantages
from armature.components.rollouts.settings import BatchSettings

Vocabulary = tuple[int, int]
"""How many token ids can be sampled, and how many can be in a sequence at all."""
MOST_TOKENS = 2**31
POSITIVE_LOGPROB = 1e-3
_KINDS = {"input_ids": "iu", "loss_mask": "b", "behavior_logprobs": "f", "policy_versions": "iu", "advantages": "f"}


def sample_defect(sample: Sample, vocabulary: Vocabulary = (MOST_TOKENS, MOST_TOKENS)) -> tuple[str, str] | None:
    """The first field that cannot be trained on, and what is wrong with it; None for a sound sample."""
    length = np.shape(sample.input_ids)
    for name, kinds in _KINDS.items():
        values = getattr(sample, name)
        if not isinstance(values, np.ndarray) or values.dtype.kind not in kinds:
            return name, f"holds {getattr(values, 'dtype', type(values).__name__)}"
        if values.ndim != 1 or values.shape != length or not len(values):
            return name, f"has shape {values.shape}, input_ids has {length}"
    mask, ids = sample.loss_mask, sample.input_ids
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
    if highest > POSITIVE_LOGPROB:
        return "behavior_logprobs", f"{highest:.4g} is not a log-probability"
    return None if np.isfinite(sample.reward) else ("reward", f"is {sample.reward}")


def check_samples(
    samples: Sequence[Sample], vocabulary: Vocabulary = (MOST_TOKENS, MOST_TOKENS), where: str = "the batch"
) -> None:
    """
    Raises:
        DataError: a sample that cannot be trained on; names batch, row and field.
    """
    for row, sample in enumerate(samples):
        if defect := sample_defect(sample, vocabulary):
            raise refusal(f"{defect[0]} {defect[1]}", where, row, sample)


def refusal(what: str, where: str, row: int, sample: Sample) -> DataError:
    """The error that a sample cannot be trained on."""
    return DataError(
        what,
        code="sample_not_trainable",
        where=f"{where}, row {row}, sample {sample.sample_id}",
        remedy="find out who wrote it; a run continues without the batch of step N with machine.skip_batches = [N]",
    )


# From rollouts to the samples of one training step.

log = logging.getLogger(__name__)


class SampleSource(Protocol):
    """What an adapter does here: exact token sequences from trajectories, drops counted by reason."""

    def samples(
        self, outputs: GenerateOutputs, advantages: TurnAdvantages | None = None
    ) -> tuple[list[Sample], Counter[str]]: ...


SampleT = TypeVar("SampleT")


@dataclass(frozen=True)
class BuiltBatch(Generic[SampleT]):
    """`drops` counts samples that were lost by reason; `metrics` describe what is left."""

    samples: Sequence[SampleT]
    drops: Counter[str]
    metrics: dict[str, float]


def build_batch(
    outputs: GenerateOutputs,
    adapter: SampleSource,
    settings: BatchSettings,
    vocabulary: Vocabulary = (MOST_TOKENS, MOST_TOKENS),
) -> BuiltBatch[Sample]:
    """Samples with the advantage of each turn on the tokens that it sampled; one with a `sample_defect` is dropped."""
    advantages = turn_advantages(outputs.trajectories, settings)
    samples, drops = adapter.samples(outputs, advantages.by_turn)
    kept = []
    for sample in samples:
        if settings.skip_zero_advantage and sample.group_id in advantages.without_gradient:
            drops["zero_advantage_group"] += 1
        elif defect := sample_defect(sample, vocabulary):
            drops[f"bad_{defect[0]}"] += 1
            log.warning("sample %s is left out: %s %s", sample.sample_id, *defect)
        else:
            kept.append(sample)
    counts = {"samples/count": float(len(kept)), "samples/dropped": float(drops.total())}
    return BuiltBatch(kept, drops, merged(advantages=advantages.metrics, samples=counts))
