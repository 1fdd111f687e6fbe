"""Which samples go into which forward pass, on which rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from components.contracts.batches import Sample
from components.vlm.packing import alike, estimated_content, in_order


@dataclass(frozen=True)
class MicroBatch:
    """The samples of one forward pass; `rows` are their positions in the step's batch, -1 for a dummy.

    If it is `packed`, what samples begin with is computed once, and there is no padding.

    A dummy is a copy of a sample with nothing to train on. It keeps ranks in step that would otherwise have
    fewer forward passes, or none through the vision tower, than the others.
    """

    samples: tuple[Sample, ...]
    rows: tuple[int, ...]
    packed: bool = False


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


def packed_micro_batches(
    samples: Sequence[Sample], rows: Sequence[int], max_tokens: int, max_rows: int, image_token: int
) -> list[MicroBatch]:
    """Put `rows` of `samples` that begin alike together, with at most `max_tokens` packed tokens in each.

    What samples of one micro-batch begin with counts once. A micro-batch that could take no more ends, once it is half
    full, where its last sample has least in common with the next. `image_token` stands for images in the samples. A
    sample longer than `max_tokens` goes alone.
    """
    contents = [estimated_content(samples[row], image_token) for row in rows]
    order = in_order(contents)
    shared = [0, *(alike(contents[a], contents[b]) for a, b in pairwise(order))]
    sizes = [len(contents[at]) for at in order]
    planned, start = [], 0
    while start < len(order):
        filled, end, ends = sizes[start], start + 1, []
        while True:
            if 2 * filled >= max_tokens or 2 * (end - start) >= max_rows:
                ends.append(end)
            if end == len(order) or end - start == max_rows or filled + sizes[end] - shared[end] > max_tokens:
                break
            filled += sizes[end] - shared[end]
            end += 1
        if end < len(order):
            end = min(ends or [end], key=lambda at: (shared[at], -at))
        members = [rows[at] for at in order[start:end]]
        planned.append(MicroBatch(tuple(samples[row] for row in members), tuple(members), packed=True))
        start = end
    return planned


def share(batches: Sequence[MicroBatch], rank: int, world_size: int) -> list[MicroBatch]:
    """The micro-batches of one rank: every rank gets as many, and all or none of a round have images."""
    if world_size == 1:
        return list(batches)
    mine = []
    for start in range(0, len(batches), world_size):
        one_round = batches[start : start + world_size]
        has_images = any(_has_images(batch) for batch in one_round)
        batch = one_round[rank] if rank < len(one_round) else replace(batches[0], samples=(), rows=())
        if not batch.samples or has_images != _has_images(batch):
            alike = (sample for other in one_round for sample in other.samples if bool(sample.images) == has_images)
            batch = _filled(batch, min(alike, key=lambda sample: len(sample.input_ids)))
        mine.append(batch)
    return mine


def _has_images(batch: MicroBatch) -> bool:
    return any(sample.images for sample in batch.samples)


def _filled(batch: MicroBatch, sample: Sample) -> MicroBatch:
    dummy = replace(sample, loss_mask=np.zeros_like(sample.loss_mask))
    return replace(batch, samples=(*batch.samples, dummy), rows=(*batch.rows, -1))
