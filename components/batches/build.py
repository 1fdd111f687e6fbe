"""From rollouts to the samples of one training step."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from armature.components.batches.advantages import turn_advantages
from armature.components.batches.check import MOST_TOKENS, Vocabulary, sample_defect
from armature.components.batches.settings import BatchSettings
from armature.components.contracts.batches import Sample, TurnAdvantages
from armature.components.contracts.metrics import merged
from armature.components.contracts.rollouts import GenerateOutputs

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
