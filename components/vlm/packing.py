"""Planning micro-batches, and packing rows into one sequence without padding that stores shared prefixes once.

Rows with a shared prefix form a tree, as in a radix cache. Its nodes are segments, and the segments from the root to
a leaf are a row. Two tokens are the same if their ids are equal and, for image tokens, their images are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
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
    """A batch whose rows are packed: shared prefixes are stored once, and so are the features of each distinct image.

    If several ranks share the batch, each has the features of the images that it encodes.
    """

    packing: Packing
    grids: dict[str, Tensor]
    """Grids of the images in the rows, row after row, with repetitions."""


@dataclass(frozen=True)
class Segment:
    """The tokens from `start` to `end` of `row`, which are the same in all rows that have this segment in their path.

    `path` has the numbers of the segments from the beginning of these rows to this one, which is the last.
    """

    row: int
    start: int
    end: int
    path: tuple[int, ...]


def content(sample: Sample, image_token: int, counts: Sequence[int]) -> Ints:
    """Return numbers (L,) by which tokens are compared: token ids, and for image tokens a negative hash of the image.
    A hash of the experts of each token is added, so that only rows with equal experts share a prefix.

    Args:
        counts: number of tokens of each image of the sample.
    """
    values = sample.input_ids.astype(np.int64)
    if sample.images:
        names = [-1 - int(ref.sha256[:15], 16) for ref in sample.images]
        values[values == image_token] = np.repeat(np.array(names, dtype=np.int64), counts)
    if sample.experts is not None:
        experts = sample.experts.reshape(len(values), -1).astype(np.int64)
        values += experts @ np.random.default_rng(0).integers(2**62, size=experts.shape[1])
    return values


def estimated_content(sample: Sample, image_token: int) -> Ints:
    """Return an estimate of the result of `content`, before the images are processed.

    It assumes that all images of a row have equally many tokens.
    """
    total = int((sample.input_ids == image_token).sum())
    ends = np.linspace(0, total, len(sample.images) + 1).round().astype(int)
    return content(sample, image_token, np.diff(ends).tolist())


def sort_rows(contents: Sequence[Ints]) -> list[int]:
    """Return the rows in sorted order, so that rows with a shared prefix are neighbors. The sort is stable."""
    return sorted(range(len(contents)), key=lambda row: (contents[row].astype(">i8").tobytes(), row))


def shared_prefix(one: Ints, other: Ints) -> int:
    """Return the length of the shared prefix of two rows.

    Example:
        >>> shared_prefix(np.array([5, 6, 7]), np.array([5, 6, 8, 9]))
        2
    """
    shorter = min(len(one), len(other))
    different = one[:shorter] != other[:shorter]
    return int(different.argmax()) if different.any() else shorter


def tree(contents: Sequence[Ints], whole: Sequence[Bools]) -> tuple[list[Segment], list[tuple[int, ...]]]:
    """Build the tree of shared prefixes; return its segments, parents first, and the path of each row.

    Args:
        contents: the rows as `content` returns them.
        whole: a mask (L,) for each row. Runs of True are never cut, because image tokens may attend to later tokens of
            their image.
    """
    order = sort_rows(contents)
    shared = [0, *(shared_prefix(contents[a], contents[b]) for a, b in pairwise(order))]
    segments: list[Segment] = []
    paths: list[tuple[int, ...]] = [()] * len(contents)
    # Ranges of `order` still to be divided: first and last row, the token at which they go on, and their path so far.
    stack: list[tuple[int, int, int, tuple[int, ...]]] = [(0, len(order), 0, ())] if order else []
    while stack:
        first, last, start, path = stack.pop()
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
        stack += [(a, b, end, path) for a, b in reversed(list(pairwise(cuts)))]
    return segments, paths


def _uncut(end: int, whole: Sequence[Bools]) -> int:
    """Return `end`, or a smaller position if a cut at `end` would split a run of True in one of the rows.

    The smaller position is the start of that run.
    """
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
    """Return the layout of rows packed into one sequence.

    Args:
        contents, whole: see `tree`.
        images: for each row, the numbers of the distinct images in it, in order.
        places: for each row, the columns of its image tokens.
        image_tokens: for each distinct image, its number of tokens.
        ranks: number of ranks that share the sequence.

    Raises:
        DataError: two rows with a shared prefix begin to differ within an image.
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
        parents=tuple((-1, *segment.path)[-2] for segment in segments),
        images=tuple(shown),
        image_tokens=tuple(image_tokens),
        encoders=assign_encoders(image_tokens, ranks),
    )


def _images_of(
    segment: Segment, images: Sequence[Sequence[int]], places: Sequence[Ints], image_tokens: Sequence[int]
) -> Iterator[int]:
    """Yield the images whose tokens are in the segment."""
    end = 0
    for image in images[segment.row] if images else ():
        begin, end = end, end + image_tokens[image]
        first, last = places[segment.row][begin], places[segment.row][end - 1]
        if first < segment.end and last >= segment.start:
            if first < segment.start or last >= segment.end:
                raise DataError(
                    f"rows with a shared prefix separate at token {segment.start} or {segment.end}, within the "
                    f"image of tokens {first} to {last}",
                    code="image_split",
                    where=f"row {segment.row} of a micro-batch",
                    remedy="set trainer.packing = false",
                )
            yield image


def packed_batch(
    collator: SampleCollator,
    samples: Sequence[Sample],
    features: Callable[[ImageRef], Features],
    rank: int = 0,
    ranks: int = 1,
) -> PackedBatch:
    """Collate samples into a packed batch, as `SampleCollator.collate_features` does into a padded one.

    Args:
        features: returns the features of an image; it is called once for each distinct image.
        rank: this rank's number among the `ranks` that share the batch.

    Raises:
        DataError: there are no samples, or a row's placeholders do not match its images.
    """
    batch = collator.rows(samples)
    numbers = {ref: number for number, ref in enumerate(dict.fromkeys(ref for one in samples for ref in one.images))}
    of_images = [features(ref) for ref in numbers]
    tokens = [int(one[PLACEHOLDER_RUNS].sum()) for one in of_images]
    images = [[numbers[ref] for ref in sample.images] for sample in samples]
    for sample, shown in zip(samples, images, strict=True):
        collator.check_row(sample, [of_images[image] for image in shown])
    collator.add_positions(batch, [[of_images[image] for image in shown] for shown in images])
    token = collator.image_token_id
    packing = packing_of(
        [content(one, token, [tokens[i] for i in shown]) for one, shown in zip(samples, images, strict=True)],
        [np.isin(sample.input_ids, sorted(collator.typed_token_ids)) for sample in samples],
        images,
        [np.flatnonzero(sample.input_ids == token) for sample in samples],
        tokens,
        ranks,
    )
    collator.add_images(batch, [of_images[image] for image in images_encoded_by(rank, packing.encoders, tokens)])
    grids = collator.join([of_images[image] for row in images for image in row], GRIDS)
    return PackedBatch(**vars(batch), packing=packing, grids=grids)


# --- Planning: which samples share a forward pass, and on which rank ---

Part = TypeVar("Part")


@dataclass(frozen=True)
class MicroBatch:
    """The samples of one forward pass.

    A rank that has fewer forward passes than others, or none through the vision tower, gets dummies: copies of a sample
    without trained tokens. They keep the ranks' collectives in step.
    """

    samples: tuple[Sample, ...]
    rows: tuple[int, ...]
    """Positions of the samples in the step's batch, -1 for a dummy."""
    packed: bool = False
    """Pack the samples into one sequence without padding, in which shared prefixes are computed once."""


def updates(n_samples: int, samples_per_update: int) -> Iterator[range]:
    """Yield the positions of the samples of each optimizer update, in order.

    Args:
        samples_per_update: number of samples of an update; 0 makes one update of all samples.

    Example:
        >>> list(updates(5, 2))
        [range(0, 2), range(2, 4), range(4, 5)]
    """
    size = samples_per_update or max(n_samples, 1)
    for start in range(0, n_samples, size):
        yield range(start, min(start + size, n_samples))


def micro_batches(
    samples: Sequence[Sample], rows: Sequence[int], max_tokens: int, max_rows: int, ranks: int = 1, together: int = 1
) -> list[MicroBatch]:
    """Plan padded micro-batches for the samples at the positions `rows`, longest samples first.

    In each micro-batch, the number of rows times the length of the longest one is at most `max_tokens`. Lengths include
    image tokens, which the server expanded. A sample longer than `max_tokens` is alone. Several `ranks` get equally
    many micro-batches, and samples are spread over these as evenly as possible.

    Args:
        together: every so many consecutive `rows` stay neighbors in one micro-batch, even if they exceed its limits.
    """
    units = [tuple(rows[at : at + together]) for at in range(0, len(rows), together)]
    lengths = {unit: max(len(samples[row].input_ids) for row in unit) for unit in units}
    order = sorted(units, key=lambda unit: (-lengths[unit], unit))

    def cut(tokens: int) -> list[list[tuple[int, ...]]]:
        groups: list[list[tuple[int, ...]]] = []
        for unit in order:
            count = together * (len(groups[-1]) + 1) if groups else 0
            if groups and count <= max_rows and lengths[groups[-1][0]] * count <= tokens:
                groups[-1].append(unit)
            else:
                groups.append([unit])
        return groups

    return [_micro_batch(samples, group) for group in _even(cut, max_tokens, ranks)]


def _micro_batch(samples: Sequence[Sample], units: Sequence[Sequence[int]], packed: bool = False) -> MicroBatch:
    members = tuple(row for unit in units for row in unit)
    return MicroBatch(tuple(samples[row] for row in members), members, packed)


def packed_micro_batches(
    samples: Sequence[Sample],
    rows: Sequence[int],
    max_tokens: int,
    max_rows: int,
    image_token: int,
    ranks: int = 1,
    together: int = 1,
) -> list[MicroBatch]:
    """Plan packed micro-batches for the samples at the positions `rows`, each with at most `max_tokens` packed tokens.

    Samples with a shared prefix are put together, and the prefix counts once. A sample longer than `max_tokens`
    is alone. For one rank, a full micro-batch is cut in its second half, where neighboring samples have least in
    common. For several `ranks`, which all get equally many micro-batches, their sizes are as even as possible, even if
    that cuts groups with a shared prefix.

    Args:
        image_token: id of the tokens that stand for images.
        together: see `micro_batches`.
    """
    contents = [estimated_content(samples[row], image_token) for row in rows]
    units = [range(at, min(at + together, len(rows))) for at in range(0, len(rows), together)]
    order = sort_rows([contents[unit[0]] for unit in units])
    shared = [0, *(shared_prefix(contents[units[a][0]], contents[units[b][0]]) for a, b in pairwise(order))]
    sizes = [
        sum(len(contents[at]) for at in units[place])
        - sum(shared_prefix(contents[a], contents[b]) for a, b in pairwise(units[place]))
        for place in order
    ]
    cut = partial(_packed, sizes, shared, max_rows=max(max_rows // together, 1), at_borders=ranks == 1)
    return [
        _micro_batch(samples, [[rows[at] for at in units[order[place]]] for place in places], packed=True)
        for places in _even(cut, max_tokens, ranks)
    ]


def _packed(
    sizes: Sequence[int], shared: Sequence[int], max_tokens: int, *, max_rows: int, at_borders: bool
) -> list[range]:
    """Cut a sorted list of samples into runs, one for each micro-batch.

    Args:
        sizes: number of tokens of each sample.
        shared: number of tokens that each sample has in common with the one before.
        at_borders: prefer cuts between samples with little in common.
    """
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
    """Return the parts that `cut` makes with the smallest token limit that does not increase the number of rounds.

    A round is one part for each of `ranks` ranks. The limit `max_tokens` determines the number of rounds. The smallest
    limit is found by bisection.
    """
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
    """Return the micro-batches of one rank, with dummies added.

    All ranks get equally many, and in each round, one micro-batch per rank, either all or none have images.
    """
    if world_size == 1:
        return list(batches)
    mine = []
    for start in range(0, len(batches), world_size):
        one_round = batches[start : start + world_size]
        has_images = any(_has_images(batch) for batch in one_round)
        batch = one_round[rank] if rank < len(one_round) else replace(batches[0], samples=(), rows=())
        if not batch.samples or has_images != _has_images(batch):
            candidates = (one for other in one_round for one in other.samples if bool(one.images) == has_images)
            batch = _filled(batch, min(candidates, key=lambda sample: len(sample.input_ids)))
        mine.append(batch)
    return mine


def _has_images(batch: MicroBatch) -> bool:
    return any(sample.images for sample in batch.samples)


def _filled(batch: MicroBatch, sample: Sample) -> MicroBatch:
    dummy = replace(sample, loss_mask=np.zeros_like(sample.loss_mask))
    return replace(batch, samples=(*batch.samples, dummy), rows=(*batch.rows, -1))
