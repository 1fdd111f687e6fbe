"""Attention of packed segments, compared with softmax attention in plain torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from armature.components.models.packed_attention import Segments, attend_packed
from tests.refusals import refused

from .reference import softmax_attention
from .test_varlen import DEVICES, compare

LENGTHS = (5, 3, 4, 3)
PATHS = ((0,), (0, 1), (2,), (0, 3))
NUMBERS = [number for number, length in enumerate(LENGTHS) for _ in range(length)]
BLOCKS = (-1, 0, 0, 0, -1, 1, 1, 2, -1, -1, 3, 3, -1, 0, 0)
"""Number of the image that each token belongs to, or -1 for text. Image 0 of the last segment is not the same image as
image 0 of the first segment."""


def path_of(number: int) -> list[int]:
    """Return the indices of the tokens that segment `number` may attend to, in order. The last of them are the
    segment's own tokens."""
    return [token for one in PATHS[number] for token, other in enumerate(NUMBERS) if other == one]


def segments(device: str, blocks: bool) -> Segments:
    keys = [path_of(number) for number in range(len(PATHS))]
    flat = torch.tensor([token for path in keys for token in path], device=device)
    numbers = torch.tensor(BLOCKS, device=device) if blocks else None
    return Segments(LENGTHS, flat, tuple(map(len, keys)), numbers)


def allowed(window: int | None, blocks: bool) -> Tensor:
    """Return the expected attention mask, (T, T) bool: True where the token of the row attends to the token of the
    column."""
    mask = torch.zeros(len(NUMBERS), len(NUMBERS), dtype=torch.bool)
    for token, number in enumerate(NUMBERS):
        path = path_of(number)
        position = path.index(token)
        for place, other in enumerate(path):
            one_image = blocks and NUMBERS[other] == number and BLOCKS[other] == BLOCKS[token] >= 0
            mask[token, other] = (place <= position or one_image) and (window is None or place > position - window)
    return mask


@pytest.mark.parametrize(("device", "dtype", "tolerance"), DEVICES)
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("blocks", [False, True], ids=["causal", "images in both directions"])
def test_packed_attention_equals_softmax_attention_along_paths(device, dtype, tolerance, window, blocks):
    made, mask = segments(device, blocks), allowed(window, blocks).to(device)

    def attend(*tensors: Tensor) -> Any:
        scale = tensors[0].shape[-1] ** -0.5
        return attend_packed(nn.Identity(), *tensors, None, scaling=scale, sliding_window=window, segments=made)

    shapes = [(sum(LENGTHS), heads, 32) for heads in (4, 2, 2)]
    compare(attend, lambda *tensors: softmax_attention(*tensors, mask), shapes, (device, dtype), tolerance)


def test_rejects_unknown_attention_options():
    tensors = [torch.randn(1, 2, sum(LENGTHS), 32) for _ in range(3)]
    with refused("packing_unsupported", "Identity", "softcap"):
        attend_packed(nn.Identity(), *tensors, None, softcap=30.0, segments=segments("cpu", False))
