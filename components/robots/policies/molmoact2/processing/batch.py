"""Model inputs: single examples, and batches with one example per row or several packed into a row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from armature.components.contracts.errors import DataError
from armature.components.robots.policies.model import ModelBatch, ModelExample

Ints = NDArray[np.int64]
Floats = NDArray[np.float32]
Flags = NDArray[np.bool_]
Pixels = NDArray[np.uint8]
PadSide = Literal["left", "right"]

IGNORED, NO_EXAMPLE = -100, -1


@dataclass(frozen=True)
class Example(ModelExample):
    """One encoded observation, for training with the actions that followed it. S tokens, C crops, P image tokens.

    input_ids: (S,), without padding; the first token is BOS.
    image_tokens: (S,), True for tokens of an image: patches, column ends, and the image's start and end.
    pixel_values: (C, patches, pixels of a patch) uint8 levels; C is 0 without images.
    pooling: (P, 4) indices of the patches of each image token, counted over all crops of the example; -1 is no patch.
    labels: (S,) for discrete actions, -100 for tokens without a loss; None if discrete actions are not trained.
    actions: (T, max_action_dim) normalized, 0 in dimensions that the robot does not have; None at inference.
    horizon_padding: (T,) True for steps without a loss: beyond the dataset's chunk, and, unless
        `TrainingSemantics.supervises_past_end`, beyond the episode's end.
    dimension_padding: (max_action_dim,) True for dimensions that the robot does not have.
    """

    image_tokens: Flags
    pixel_values: Pixels
    pooling: Ints
    labels: Ints | None
    actions: Floats | None
    horizon_padding: Flags | None
    dimension_padding: Flags


@dataclass(frozen=True)
class PolicyBatch(ModelBatch):
    """E examples as tensors of B rows with L tokens; a packed row holds several examples.

    input_ids, position_ids: (B, L) int64; positions start at 0 in each example and are 0 for padding.
    example_ids: (B, L) int64, the number (0 to E - 1) of a token's example; -1 is padding.
    image_tokens: (B, L) bool.
    pixel_values: (C, patches, pixels of a patch) uint8, the crops of all examples in order.
    pooling: (P, 4) int64, patch indices counted over all C crops; -1 is no patch.
    rows: (E,) int64, the row of each example.
    labels: (B, L) int64 or None. actions: (E, T, D) float32 or None. horizon_padding: (E, T) bool or None.
    dimension_padding: (E, D) bool.
    """

    OBSERVED = (
        *("input_ids", "position_ids", "example_ids", "image_tokens"),
        *("pixel_values", "pooling", "rows", "dimension_padding"),
    )

    position_ids: Tensor
    example_ids: Tensor
    image_tokens: Tensor
    pixel_values: Tensor
    pooling: Tensor
    rows: Tensor
    labels: Tensor | None
    horizon_padding: Tensor | None
    dimension_padding: Tensor

    @property
    def examples(self) -> int:
        """Number of examples, E."""
        return self.rows.shape[0]

    @property
    def padding(self) -> Tensor:
        """Mask of the rows, (B, L) bool, True for padding."""
        return self.example_ids == NO_EXAMPLE


def collate(examples: Sequence[Example], pad_side: PadSide, multiple: int, pad_id: int) -> PolicyBatch:
    """Make a batch with one example per row.

    L is one more than a multiple of `multiple`: the released code pads to a multiple first and then adds BOS.

    Raises:
        DataError: `examples` is empty, or examples differ in having labels or actions, or in the actions' length.
    """
    return _batch(examples, [[index] for index in range(len(examples))], pad_side, multiple, pad_id)


def pack(examples: Sequence[Example], rows: Sequence[Sequence[int]], multiple: int, pad_id: int) -> PolicyBatch:
    """Make a batch with several examples per row, padded on the right.

    Args:
        rows: Indices into `examples` for each row. The batch numbers its examples in this order.

    Raises:
        DataError: see `collate`.
    """
    return _batch(examples, rows, "right", multiple, pad_id)


def _batch(
    examples: Sequence[Example], rows: Sequence[Sequence[int]], pad_side: PadSide, multiple: int, pad_id: int
) -> PolicyBatch:
    """Make a batch whose row i holds the examples with the indices `rows[i]`; see `collate` and `pack`."""
    chosen = [examples[index] for row in rows for index in row]
    _check(chosen)
    longest = max(sum(examples[index].length for index in row) for row in rows)
    width = 1 + -(-(longest - 1) // multiple) * multiple
    shape = (len(rows), width)
    input_ids, positions = np.full(shape, pad_id, np.int64), np.zeros(shape, np.int64)
    owners, image_tokens = np.full(shape, NO_EXAMPLE, np.int64), np.zeros(shape, bool)
    labels = np.full(shape, IGNORED, np.int64)
    number = 0
    for row, members in enumerate(rows):
        start = width - sum(examples[index].length for index in members) if pad_side == "left" else 0
        for index in members:
            example = examples[index]
            place = (row, slice(start, start + example.length))
            input_ids[place], positions[place] = example.input_ids, np.arange(example.length)
            owners[place], image_tokens[place] = number, example.image_tokens
            if example.labels is not None:
                labels[place] = example.labels
            start, number = start + example.length, number + 1
    return PolicyBatch(
        input_ids=torch.from_numpy(input_ids),
        position_ids=torch.from_numpy(positions),
        example_ids=torch.from_numpy(owners),
        image_tokens=torch.from_numpy(image_tokens),
        pixel_values=torch.from_numpy(np.concatenate([each.pixel_values for each in chosen])),
        pooling=torch.from_numpy(_pooling(chosen)),
        rows=torch.tensor([row for row, members in enumerate(rows) for _ in members]),
        labels=None if chosen[0].labels is None else torch.from_numpy(labels),
        actions=_stacked([each.actions for each in chosen]),
        horizon_padding=_stacked([each.horizon_padding for each in chosen]),
        dimension_padding=torch.from_numpy(np.stack([each.dimension_padding for each in chosen])),
    )


def _pooling(examples: Sequence[Example]) -> NDArray[np.int64]:
    """Concatenate the patch indices (P, 4) in the field `pooling` of all examples.

    In an example they count over the example's own crops; in the result they count over all crops of the batch.
    """
    crops = np.cumsum([0] + [len(each.pixel_values) for each in examples[:-1]])
    patches = examples[0].pixel_values.shape[1]
    return np.concatenate(
        [
            np.where(each.pooling < 0, -1, each.pooling + before * patches)
            for each, before in zip(examples, crops, strict=True)
        ]
    )


def _stacked(arrays: Sequence[NDArray[np.generic] | None]) -> torch.Tensor | None:
    present = [array for array in arrays if array is not None]
    return torch.from_numpy(np.stack(present)) if present else None


def _check(examples: Sequence[Example]) -> None:
    if not examples:
        raise DataError("a batch needs at least one example", code="empty_batch")
    for name in ("labels", "actions", "horizon_padding"):
        arrays = [getattr(each, name) for each in examples]
        kinds = {None if each is None else each.shape if name != "labels" else () for each in arrays}
        if len(kinds) > 1:
            raise DataError(
                f"the examples of a batch differ in {name}: {sorted(map(str, kinds))}",
                code="examples_differ",
                remedy="encode all examples with actions or all without, and with the same horizon",
            )
