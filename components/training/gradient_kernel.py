"""A gradient into a sum of higher precision, in one pass over memory."""

# Triton gives its functions their types.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024


@triton.jit
def _add(total, gradient, count, BLOCK: tl.constexpr, MORE: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < count
    value = tl.load(gradient + place, inside).to(tl.float32)
    if MORE:
        value += tl.load(total + place, inside)
    tl.store(total + place, value, inside)


def add(total: Tensor, gradient: Tensor, more: bool) -> None:
    """total += gradient, or without `more` total = gradient. `total` is fp32 and contiguous."""
    count = total.numel()
    if count:
        _add[(triton.cdiv(count, BLOCK),)](total, gradient.contiguous(), count, BLOCK=BLOCK, MORE=more)
