"""From rollouts to the samples of one training step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from components.batches.advantages import group_advantages
from components.batches.settings import BatchSettings
from components.contracts.batches import Sample
from components.contracts.rollouts import GenerateOutputs


class SampleSource(Protocol):
    """What an adapter does here: exact token sequences from trajectories, drops counted by reason."""

    def samples(self, outputs: GenerateOutputs) -> tuple[list[Sample], Counter[str]]: ...


@dataclass(frozen=True)
class BuiltBatch:
    """`drops` counts samples that were lost by reason; `metrics` describe what is left."""

    samples: Sequence[Sample]
    drops: Counter[str]
    metrics: dict[str, float]


def build_batch(outputs: GenerateOutputs, adapter: SampleSource, settings: BatchSettings) -> BuiltBatch:
    """Samples with their trajectory's advantage on every sampled token."""
    advantages = group_advantages(outputs.trajectories, settings.scale)
    samples, drops = adapter.samples(outputs)
    kept = []
    for sample in samples:
        if settings.skip_zero_variance and sample.group_id in advantages.zero_variance:
            drops["zero_variance_group"] += 1
        else:
            value = np.float32(advantages.by_trajectory[sample.trajectory_id])
            kept.append(replace(sample, advantages=np.where(sample.loss_mask, value, np.float32(0.0))))
    values = np.array(list(advantages.by_trajectory.values()), dtype=np.float64)
    metrics = {
        "advantage/absmean": float(np.abs(values).mean()) if values.size else 0.0,
        "groups/count": float(advantages.groups),
        "groups/zero_variance_fraction": len(advantages.zero_variance) / max(advantages.groups, 1),
        "samples/count": float(len(kept)),
        "samples/dropped": float(drops.total()),
    }
    return BuiltBatch(kept, drops, metrics)
