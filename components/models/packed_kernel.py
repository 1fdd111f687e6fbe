"""The gradient of rows that were taken several times, as one Triton kernel that adds them up in fp32."""

# Triton gives its functions their types.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _sum_copies(
    gradient, order, begins, out, n_tokens, heads, width,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, COPIES: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0)
    head, column = tl.arange(0, HEADS)[:, None], tl.arange(0, WIDTH)[None, :]
    inside = (head < heads) & (column < width)
    place = gradient + head * width + column
    if COPIES:
        total = tl.zeros((HEADS, WIDTH), dtype=tl.float32)
        at, end = tl.load(begins + token), tl.load(begins + token + 1)
        while at < end:  # Triton's interpreter knows no range of loaded numbers
            row = tl.load(order + at)
            total += tl.load(place + row * heads * width, inside, other=0.0).to(tl.float32)
            at += 1
    else:
        total = tl.load(place + token.to(tl.int64) * heads * width, inside, other=0.0)
    to = out + head.to(tl.int64) * n_tokens * width + token * width + column
    tl.store(to, total.to(out.dtype.element_ty), inside)


def sum_copies(gradient: Tensor, copies: tuple[Tensor, Tensor] | None, n_tokens: int) -> Tensor:
    """(T, H, D) sums of the rows of `gradient` (K, H, D) that are copies of each token, which lie head after head.

    Args:
        copies: (K,) the copies of the first token, then those of the second, ...; (T + 1,) where each one's begin;
            None: each token is there once, in order.
    """
    _, heads, width = gradient.shape
    out = gradient.new_empty(heads, n_tokens, width)
    order, begins = (None, None) if copies is None else copies
    if n_tokens:
        _sum_copies[(n_tokens,)](
            gradient.contiguous(),
            order,
            begins,
            out,
            n_tokens,
            heads,
            width,
            HEADS=triton.next_power_of_2(heads),
            WIDTH=triton.next_power_of_2(width),
            COPIES=copies is not None,
        )
    return out.transpose(0, 1)
