"""Examples as a batch: one to a row, or several packed into each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from components.contracts.errors import DataError
from components.policies.molmoact2.processing.batch import Example, PolicyBatch

IGNORED, NO_EXAMPLE = -100, -1


PadSide = Literal["left", "right"]


def collate(examples: Sequence[Example], pad_side: PadSide, multiple: int, pad_id: int) -> PolicyBatch:
    """One example to a row. The width is one more than a multiple, as the released code has it: BOS comes last there.

    Raises:
        DataError: there is none, or some have actions (labels) and others do not, or of another length.
    """
    return _batch(examples, [[index] for index in range(len(examples))], pad_side, multiple, pad_id)


def pack(examples: Sequence[Example], rows: Sequence[Sequence[int]], multiple: int, pad_id: int) -> PolicyBatch:
    """`rows` hold indices into `examples`; the batch's examples are in the order of `rows`. Padded on the right.

    Raises:
        DataError: as `collate`.
    """
    return _batch(examples, rows, "right", multiple, pad_id)


def _batch(
    examples: Sequence[Example], rows: Sequence[Sequence[int]], pad_side: PadSide, multiple: int, pad_id: int
) -> PolicyBatch:
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
    """Counted over all crops of the batch."""
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
        raise DataError("a batch needs an example")
    for name in ("labels", "actions", "horizon_padding"):
        given = [getattr(each, name) for each in examples]
        kinds = {None if each is None else each.shape if name != "labels" else () for each in given}
        if len(kinds) > 1:
            raise DataError(
                f"the examples of a batch differ in {name}: {sorted(map(str, kinds))}",
                remedy="encode all with actions or all without, and with one horizon",
            )
