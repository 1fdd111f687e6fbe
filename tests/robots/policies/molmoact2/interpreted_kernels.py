"""The action expert's attention kernels on a CPU in float32, run by `test_interpreted` (TRITON_INTERPRET=1)."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from armature.components.robots.policies.molmoact2.modeling.attention_kernels import (
    KEYS,
    cross_attention,
    self_attention,
)
from armature.components.robots.policies.molmoact2.modeling.expert import split_heads
from armature.components.robots.policies.molmoact2.modeling.layers import rms, rotary_angles, rotate


def close(actual: Tensor, expected: Tensor) -> None:
    assert actual.shape == expected.shape
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("heads", "size"), [(8, 96), (2, 16), (4, 24)])
@pytest.mark.parametrize(("rows", "steps"), [(1, 10), (3, 17), (2, 1)])
def test_self_attention_kernel_equals_torch(rows: int, steps: int, heads: int, size: int) -> None:
    random = torch.Generator().manual_seed(0)
    qkv = 3 * torch.randn(rows, steps, 3 * heads * size, generator=random)
    angles = rotary_angles(torch.arange(steps), size, 10_000.0)
    queries, keys, values = (split_heads(part, heads) for part in qkv.chunk(3, dim=-1))
    queries, keys = (rotate(rms(each), angles.cos(), angles.sin()) for each in (queries, keys))
    expected = functional.scaled_dot_product_attention(queries, keys, values).transpose(1, 2).flatten(2)
    close(self_attention(qkv, angles.cos(), angles.sin(), heads), expected)


@pytest.mark.parametrize(("heads", "size"), [(8, 96), (2, 16)])
@pytest.mark.parametrize(("rows", "steps", "length"), [(1, 10, KEYS), (3, 17, 2 * KEYS + 5), (2, 1, 7)])
def test_cross_attention_kernel_equals_torch(rows: int, steps: int, length: int, heads: int, size: int) -> None:
    """Includes a row whose first blocks of keys are all masked; memory layouts are as in the model."""
    random = torch.Generator().manual_seed(1)
    flat = 3 * torch.randn(rows, steps, heads * size, generator=random)
    keys = 2 * torch.randn(rows, length, heads, size, generator=random).transpose(1, 2)
    values = torch.randn(rows, heads, length, size, generator=random)
    mask = torch.rand(rows, length, generator=random) < 0.5
    mask[0, : length - 1], mask[:, -1] = False, True
    mask = mask[:, None, None]
    queries = rms(split_heads(flat, heads))
    attended = functional.scaled_dot_product_attention(queries, keys, values, attn_mask=mask)
    close(cross_attention(flat, keys, values, mask), attended.transpose(1, 2).flatten(2))
