"""Rows without padding in one sequence, in which what several of them begin with lies once.

Rows that begin alike form a tree: its nodes are segments, and a row is the segments from the root to a leaf. Tokens are
alike if they are equal and, where they stand for an image, if the image is.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from armature.components.contracts.batches import MultimodalBatch, Sample
from armature.components.contracts.errors import DataError
from armature.components.contracts.images import ImageRef
from armature.components.families.joins import Features
from armature.components.models.adapters.collate import PLACEHOLDER_RUNS, SampleCollator
from armature.components.models.context_parallel import assign_encoders, images_encoded_by
from armature.components.models.packed import GRIDS, Packing

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


@dataclass(kw_only=True)
class PackedBatch(MultimodalBatch):
    """A batch whose rows share what they begin with: features of images are those of each distinct image, once; of
    ranks that share it, each has those that it encodes. `grids`: of the images that the rows show, row after row.
    """

    packing: Packing
    grids: dict[str, Tensor]


@dataclass(frozen=True)
class Segment:
    """The tokens from `start` to `end` of `row`, and of all rows that have it in their path.

    `path` are the segments that these rows begin with, in order; the last is this one.
    """

    row: int
    start: int
    end: int
    path: tuple[int, ...]


def content(sample: Sample, image_token: int, counts: Sequence[int]) -> Ints:
    """(L,) what each token stands for: its id, or a negative number for each of the images; image k has `counts[k]`."""
    values = sample.input_ids.astype(np.int64)
    if not sample.images:
        return values
    names = [-1 - int(ref.sha256[:15], 16) for ref in sample.images]
    values[values == image_token] = np.repeat(np.array(names, dtype=np.int64), counts)
    return values


def estimated_content(sample: Sample, image_token: int) -> Ints:
    """`content` where nobody has processed the images yet: each of a row is taken to have as many tokens."""
    total = int((sample.input_ids == image_token).sum())
    ends = np.linspace(0, total, len(sample.images) + 1).round().astype(int)
    return content(sample, image_token, np.diff(ends).tolist())


def in_order(contents: Sequence[Ints]) -> list[int]:
    """The rows in an order in which those that begin alike are neighbors; of equal ones the first comes first."""
    return sorted(range(len(contents)), key=lambda row: (contents[row].astype(">i8").tobytes(), row))


def alike(one: Ints, other: Ints) -> int:
    """How many tokens both begin with."""
    shorter = min(len(one), len(other))
    different = one[:shorter] != other[:shorter]
    return int(different.argmax()) if different.any() else shorter


def tree(contents: Sequence[Ints], whole: Sequence[Bools]) -> tuple[list[Segment], list[tuple[int, ...]]]:
    """The segments, those of a path in order, and the path of each row.

    Args:
        contents: see `content`.
        whole: (L,) of each row; a run of True is not cut: within an image tokens may attend to later ones.
    """
    order = in_order(contents)
    shared = [0, *(alike(contents[a], contents[b]) for a, b in pairwise(order))]
    segments: list[Segment] = []
    paths: list[tuple[int, ...]] = [()] * len(contents)
    ahead: list[tuple[int, int, int, tuple[int, ...]]] = [(0, len(order), 0, ())] if order else []
    while ahead:
        first, last, start, path = ahead.pop()
        row = order[first]
        together = min(shared[first + 1 : last], default=len(contents[row]))
        end = max(start, _uncut(together, [whole[one] for one in order[first:last]]))
        if end > start:
            path = (*path, len(segments))
            segments.append(Segment(row, start, end, path))
        if last - first == 1:
            paths[row] = path
            continue
        cuts = [first, *(at for at in range(first + 1, last) if shared[at] == together), last]
        ahead += [(a, b, end, path) for a, b in reversed(list(pairwise(cuts)))]
    return segments, paths


def _uncut(end: int, whole: Sequence[Bools]) -> int:
    """`end`, or where the run begins that a cut there would split in one of the rows."""
    if end == 0 or not whole[0][end - 1] or not any(len(row) > end and row[end] for row in whole):
        return end
    before = np.flatnonzero(~whole[0][:end])
    return int(before[-1]) + 1 if len(before) else 0


def packing_of(
    contents: Sequence[Ints],
    whole: Sequence[Bools],
    images: Sequence[Sequence[int]] = (),
    places: Sequence[Ints] = (),
    image_tokens: Sequence[int] = (),
    ranks: int = 1,
) -> Packing:
    """How the rows are packed.

    Args:
        contents, whole: see `tree`.
        images: of each row, which of the distinct images it shows, in order.
        places: of each row, the columns of its image tokens.
        image_tokens: of each distinct image, how many tokens it has.
        ranks: how many share the sequence.

    Raises:
        DataError: rows that begin alike part within an image.
    """
    segments, paths = tree(contents, whole)
    lengths = [segment.end - segment.start for segment in segments]
    ends = np.cumsum(lengths)
    spans = [np.arange(end - length, end) for end, length in zip(ends, lengths, strict=True)]
    table = np.zeros((len(contents), max(map(len, contents), default=0)), dtype=np.int64)
    for row, path in enumerate(paths):
        table[row, : len(contents[row])] = np.concatenate([spans[one] for one in path])
    keys = [np.concatenate([spans[one] for one in segment.path]) for segment in segments]
    shown = [image for segment in segments for image in _images_of(segment, images, places, image_tokens)]
    return Packing(
        rows=torch.from_numpy(np.repeat([segment.row for segment in segments], lengths)),
        columns=torch.from_numpy(np.concatenate([np.arange(one.start, one.end) for one in segments])),
        places=torch.from_numpy(table),
        lengths=tuple(lengths),
        keys=torch.from_numpy(np.concatenate(keys)),
        key_lengths=tuple(map(len, keys)),
        images=tuple(shown),
        image_tokens=tuple(image_tokens),
        encoders=assign_encoders(image_tokens, ranks),
    )


def _images_of(
    segment: Segment, images: Sequence[Sequence[int]], places: Sequence[Ints], image_tokens: Sequence[int]
) -> Iterator[int]:
    """The images whose tokens the segment has."""
    end = 0
    for image in images[segment.row] if images else ():
        begin, end = end, end + image_tokens[image]
        first, last = places[segment.row][begin], places[segment.row][end - 1]
        if first < segment.end and last >= segment.start:
            if first < segment.start or last >= segment.end:
                raise DataError(
                    f"tokens {first} to {last} are an image, and rows that begin alike part at {segment.start} or "
                    f"{segment.end}",
                    code="image_split",
                    where=f"row {segment.row} of a micro-batch",
                    remedy="leave trainer.packing out",
                )
            yield image


def packed_batch(
    collator: SampleCollator,
    samples: Sequence[Sample],
    features: Callable[[ImageRef], Features],
    rank: int = 0,
    ranks: int = 1,
) -> PackedBatch:
    """As `SampleCollator.collate_features`, with each distinct image once, and how the rows are packed.

    Of several `ranks` that share the batch it is for `rank`.

    Raises:
        DataError: no samples, or a row's placeholders are not those that its images need.
    """
    batch = collator.rows(samples)
    numbers = {ref: number for number, ref in enumerate(dict.fromkeys(ref for one in samples for ref in one.images))}
    found = [features(ref) for ref in numbers]
    tokens = [int(one[PLACEHOLDER_RUNS].sum()) for one in found]
    images = [[numbers[ref] for ref in sample.images] for sample in samples]
    for sample, shown in zip(samples, images, strict=True):
        collator.check_row(sample, [found[image] for image in shown])
    token = collator.image_token_id
    packing = packing_of(
        [content(one, token, [tokens[i] for i in shown]) for one, shown in zip(samples, images, strict=True)],
        [_marked(sample, collator.typed_token_ids) for sample in samples],
        images,
        [np.flatnonzero(sample.input_ids == token) for sample in samples],
        tokens,
        ranks,
    )
    collator.add_images(batch, [found[image] for image in images_encoded_by(rank, packing.encoders, tokens)])
    grids = collator.join([found[image] for row in images for image in row], GRIDS)
    return PackedBatch(**vars(batch), packing=packing, grids=grids)


def _marked(sample: Sample, tokens: Collection[int]) -> Bools:
    return np.isin(sample.input_ids, sorted(tokens))


# Which samples go into which forward pass, on which rank.

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
