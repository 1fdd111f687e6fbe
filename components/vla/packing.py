"""Which examples share a row."""

from __future__ import annotations

from collections.abc import Sequence

from armature.components.policies.molmoact2.processing.batch import Example, PadSide, PolicyBatch, collate, pack
from armature.components.vla.settings import PackingSettings


def arranged(
    examples: Sequence[Example], packing: PackingSettings | None, pad_side: PadSide, multiple: int, pad_id: int
) -> tuple[PolicyBatch, list[int]]:
    """Examples as a batch, packed or one to a row, and which of them each of the batch's examples is.

    Args:
        pad_side: where rows are not packed.

    Raises:
        DataError: as `collate`.
    """
    if packing is None:
        return collate(examples, pad_side, multiple, pad_id), list(range(len(examples)))
    rows = packed_rows([example.length for example in examples], packing)
    return pack(examples, rows, multiple, pad_id), [index for row in rows for index in row]


def packed_rows(lengths: Sequence[int], settings: PackingSettings) -> list[list[int]]:
    """The examples of each row, by best fit: longest first, each into the fullest row that still has room.

    Args:
        lengths: tokens of each example.

    Returns:
        Every example once; rows and the examples in them ascend. No row is longer than `max_row_tokens`, except for
        one with a single example that is.
    """
    rows: list[list[int]] = []
    free: list[int] = []
    for example in sorted(range(len(lengths)), key=lambda example: (-lengths[example], example)):
        length = lengths[example]
        fitting = [r for r in range(len(rows)) if free[r] >= length and len(rows[r]) < settings.max_row_examples]
        if fitting:
            row = min(fitting, key=lambda r: (free[r], r))
            rows[row].append(example)
            free[row] -= length
        else:
            rows.append([example])
            free.append(settings.max_row_tokens - length)
    return sorted(sorted(row) for row in rows)
