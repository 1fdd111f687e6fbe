"""Which samples go into which forward pass, on which rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from components.contracts.batches import Sample


@dataclass(frozen=True)
class MicroBatch:
    """The samples of one forward pass; `rows` are their positions in the step's batch, -1 for a dummy.

    A dummy is a copy of a sample with nothing to train on. It keeps ranks in step that would otherwise have
    fewer forward passes, or none through the vision tower, than the others.
    """

    samples: tuple[Sample, ...]
    rows: tuple[int, ...]


def updates(n_samples: int, samples_per_update: int) -> Iterator[range]:
    """The positions of the samples of each optimizer update, in order; 0 means one update for all."""
    size = samples_per_update or max(n_samples, 1)
    for start in range(0, n_samples, size):
        yield range(start, min(start + size, n_samples))


def micro_batches(samples: Sequence[Sample], rows: Sequence[int], max_tokens: int, max_rows: int) -> list[MicroBatch]:
    """Pack `rows` of `samples`, longest first, so that rows * longest <= max_tokens in each.

    Lengths count image tokens: the server had expanded them. A sample longer than `max_tokens` goes alone.
    """
    packed: list[list[int]] = []
    for row in sorted(rows, key=lambda row: (-len(samples[row].input_ids), row)):
        longest = len(samples[packed[-1][0]].input_ids) if packed else 0
        if packed and len(packed[-1]) < max_rows and longest * (len(packed[-1]) + 1) <= max_tokens:
            packed[-1].append(row)
        else:
            packed.append([row])
    return [MicroBatch(tuple(samples[row] for row in group), tuple(group)) for group in packed]


def share(batches: Sequence[MicroBatch], rank: int, world_size: int) -> list[MicroBatch]:
    """The micro-batches of one rank: every rank gets as many, and all or none of a round have images."""
    if world_size == 1:
        return list(batches)
    mine = []
    for start in range(0, len(batches), world_size):
        one_round = batches[start : start + world_size]
        has_images = any(_has_images(batch) for batch in one_round)
        batch = one_round[rank] if rank < len(one_round) else MicroBatch((), ())
        if not batch.samples or has_images != _has_images(batch):
            alike = (sample for other in one_round for sample in other.samples if bool(sample.images) == has_images)
            batch = _filled(batch, min(alike, key=lambda sample: len(sample.input_ids)))
        mine.append(batch)
    return mine


def _has_images(batch: MicroBatch) -> bool:
    return any(sample.images for sample in batch.samples)


def _filled(batch: MicroBatch, sample: Sample) -> MicroBatch:
    dummy = replace(sample, loss_mask=np.zeros_like(sample.loss_mask))
    return MicroBatch((*batch.samples, dummy), (*batch.rows, -1))
