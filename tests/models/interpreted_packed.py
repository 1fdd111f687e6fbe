"""The gradient kernel of packed attention on a CPU; `test_interpreted` runs this file with TRITON_INTERPRET=1."""

from __future__ import annotations

import pytest
import torch

from armature.components.models.kernels import sum_copies
from armature.components.models.packed_attention import Segments

LENGTHS, KEYS = (3, 2, 4), (0, 1, 2, 0, 1, 2, 3, 4, 0, 1, 2, 5, 6, 7, 8)
"""Three segments: a shared beginning of three tokens, and its two continuations."""


@pytest.mark.parametrize(("heads", "width"), [(2, 16), (3, 5), (1, 1)])
def test_sum_copies_equals_index_add(heads: int, width: int) -> None:
    segments = Segments(LENGTHS, torch.tensor(KEYS), (3, 5, 7))
    gradient = torch.randn(len(KEYS), heads, width, generator=torch.Generator().manual_seed(0))
    expected = torch.zeros(sum(LENGTHS), heads, width).index_add_(0, segments.keys, gradient)
    sums = sum_copies(gradient, segments.copies, sum(LENGTHS))
    torch.testing.assert_close(sums, expected, atol=1e-6, rtol=1e-6)
    assert sums.transpose(0, 1).is_contiguous()


def test_sum_copies_of_single_copies_changes_only_the_layout() -> None:
    gradient = torch.randn(7, 3, 5).half()
    sums = sum_copies(gradient, None, 7)
    assert torch.equal(sums, gradient)
    assert sums.transpose(0, 1).is_contiguous()
