"""Attention of packed segments, compared with softmax attention in plain torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from armature.components.models.packed_attention import Segments, attend_packed
from tests.refusals import refused

from .test_varlen import DEVICES, compare

LENGTHS = (5, 3, 4, 3)
PATHS = ((0,), (0, 1), (2,), (0, 3))
NUMBERS = [number for number, length in enumerate(LENGTHS) for _ in range(length)]
BLOCKS = (-1, 0, 0, 0, -1, 1, 1, 2, -1, -1, 3, 3, -1, 0, 0)
"""The last segment reuses the number of an image in the first segment, which is a different image."""


def segments(device: str, blocks: bool) -> Segments:
    keys = [[at for one in path for at, number in enumerate(NUMBERS) if number == one] for path in PATHS]
    flat = torch.tensor([at for one in keys for at in one], device=device)
    numbers = torch.tensor(BLOCKS, device=device) if blocks else None
    return Segments(LENGTHS, flat, tuple(map(len, keys)), numbers)


def written_out(q: Tensor, k: Tensor, v: Tensor, window: int | None, blocks: bool) -> Tensor:
    """Softmax attention of one token at a time in float64, (T, H, D)."""
    k, v = (tensor.repeat_interleave(q.shape[1] // k.shape[1], 1) for tensor in (k, v))
    outs = []
    for at, number in enumerate(NUMBERS):
        path = [token for one in PATHS[number] for token, other in enumerate(NUMBERS) if other == one]
        position = path.index(at)
        seen = [
            token
            for place, token in enumerate(path)
            if (
                place <= position
                or (blocks and BLOCKS[at] >= 0 and BLOCKS[token] == BLOCKS[at] and NUMBERS[token] == number)
            )
            and (window is None or place > position - window)
        ]
        scores = torch.einsum("hd,khd->hk", q[at].double(), k[seen].double()) / q.shape[-1] ** 0.5
        outs.append(torch.einsum("hk,khd->hd", scores.softmax(-1), v[seen].double()))
    return torch.stack(outs)


@pytest.mark.parametrize(("device", "dtype", "tolerance"), DEVICES)
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("blocks", [False, True], ids=["causal", "images in both directions"])
def test_packed_attention_equals_softmax_attention_along_paths(device, dtype, tolerance, window, blocks):
    made = segments(device, blocks)

    def attend(*tensors: Tensor) -> Any:
        scale = tensors[0].shape[-1] ** -0.5
        return attend_packed(nn.Identity(), *tensors, None, scaling=scale, sliding_window=window, segments=made)

    shapes = [(sum(LENGTHS), heads, 32) for heads in (4, 2, 2)]
    compare(attend, lambda *tensors: written_out(*tensors, window, blocks), shapes, (device, dtype), tolerance)


def test_rejects_unknown_attention_options():
    tensors = [torch.randn(1, 2, sum(LENGTHS), 32) for _ in range(3)]
    with refused("packing_unsupported", "Identity", "softcap"):
        attend_packed(nn.Identity(), *tensors, None, softcap=30.0, segments=segments("cpu", False))
