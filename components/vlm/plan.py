"""Which samples go into which forward pass, on which rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import TypeVar

import numpy as np

from armature.components.contracts.batches import Sample
from armature.components.vlm.packing import alike, estimated_content, in_order

Part = TypeVar("Part")


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


def micro_batches(
    samples: Sequence[Sample], rows: Sequence[int], max_tokens: int, max_rows: int, ranks: int = 1
) -> list[MicroBatch]:
    """Pack `rows` of `samples`, longest first, so that rows * longest <= max_tokens in each.

    Lengths count image tokens: the server had expanded them. A sample longer than `max_tokens` goes alone. For several
    `ranks`, of which each gets as many, they are as even as their number lets them be.
    """
    lengths = {row: len(samples[row].input_ids) for row in rows}
    order = sorted(rows, key=lambda row: (-lengths[row], row))

    def cut(tokens: int) -> list[list[int]]:
        groups: list[list[int]] = []
        for row in order:
            longest = lengths[groups[-1][0]] if groups else 0
            if groups and len(groups[-1]) < max_rows and longest * (len(groups[-1]) + 1) <= tokens:
                groups[-1].append(row)
            else:
                groups.append([row])
        return groups

    return [MicroBatch(tuple(samples[row] for row in group), tuple(group)) for group in _even(cut, max_tokens, ranks)]


def packed_micro_batches(
    samples: Sequence[Sample], rows: Sequence[int], max_tokens: int, max_rows: int, image_token: int, ranks: int = 1
) -> list[MicroBatch]:
    """Put `rows` of `samples` that begin alike together, with at most `max_tokens` packed tokens in each.

    What samples of one micro-batch begin with counts once. `image_token` stands for images in the samples. A sample
    longer than `max_tokens` goes alone. For one rank, a micro-batch that could take no more ends, once it is half full,
    where its last sample has least in common with the next. For several `ranks`, of which each gets as many
    micro-batches, they are as even as their number lets them be, and groups are cut where that makes them so.
    """
    contents = [estimated_content(samples[row], image_token) for row in rows]
    order = in_order(contents)
    shared = [0, *(alike(contents[a], contents[b]) for a, b in pairwise(order))]
    sizes = [len(contents[at]) for at in order]
    cut = partial(_packed, sizes, shared, max_rows=max_rows, at_borders=ranks == 1)
    planned = []
    for places in _even(cut, max_tokens, ranks):
        members = [rows[order[place]] for place in places]
        planned.append(MicroBatch(tuple(samples[row] for row in members), tuple(members), packed=True))
    return planned


def _packed(
    sizes: Sequence[int], shared: Sequence[int], max_tokens: int, *, max_rows: int, at_borders: bool
) -> list[range]:
    """Runs of samples in order: `sizes` are their tokens, `shared` those that each begins with like the one before."""
    runs, start = [], 0
    while start < len(sizes):
        filled, end, ends = sizes[start], start + 1, []
        while True:
            if at_borders and (2 * filled >= max_tokens or 2 * (end - start) >= max_rows):
                ends.append(end)
            if end == len(sizes) or end - start == max_rows or filled + sizes[end] - shared[end] > max_tokens:
                break
            filled += sizes[end] - shared[end]
            end += 1
        if end < len(sizes):
            end = min(ends or [end], key=lambda at: (shared[at], -at))
        runs.append(range(start, end))
        start = end
    return runs


def _even(cut: Callable[[int], Sequence[Part]], max_tokens: int, ranks: int) -> Sequence[Part]:
    """The parts with the fewest tokens at most, of as many rounds of `ranks` parts as `max_tokens` asks for."""
    parts = cut(max_tokens)
    most, least = -(-len(parts) // ranks) * ranks, 1
    while ranks > 1 and least < max_tokens:
        tokens = (least + max_tokens) // 2
        tried = cut(tokens)
        if len(tried) <= most:
            parts, max_tokens = tried, tokens
        else:
            least = tokens + 1
    return parts


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
