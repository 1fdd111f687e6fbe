"""Triton kernels of models: dequantization of 4-bit weights, and the gradient of rows that were gathered several
times."""

# Triton functions have no type annotations.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from armature.components.models.blockwise import NF4

# --- Dequantization of 4-bit weights ---

BLOCK = 1024


@triton.jit
def _dequantize(packed, scales, codes, out, count, PER_SCALE: tl.constexpr, BLOCK: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * BLOCK
    place = start + tl.arange(0, BLOCK)
    inside = place < count
    pair = tl.load(packed + place, inside, other=0).to(tl.int32)
    scale = tl.load(scales + place // PER_SCALE, inside, other=0.0)
    numbers = tl.interleave(tl.load(codes + (pair >> 4)) * scale, tl.load(codes + (pair & 15)) * scale)
    both = 2 * start + tl.arange(0, 2 * BLOCK)
    tl.store(out + both, numbers.to(out.dtype.element_ty), both < 2 * count)


@torch.library.custom_op("armature::dequantize_nf4", mutates_args=())  # torch.compile then treats it as one operator
def dequantize(packed: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Dequantize 4-bit weights to (2 * N,) numbers. Each of the N bytes of `packed` (uint8) has two codes, the first
    one in the upper half.

    Bit for bit equal to `NF4.dequantize`: code * scale in fp32, rounded once to `dtype`. Each number is read and
    written once.
    """
    count = packed.numel()
    out = torch.empty(2 * count, dtype=dtype, device=packed.device)
    grid = (triton.cdiv(count, BLOCK),)
    table = NF4.table(packed.device)
    _dequantize[grid](packed, scales, table, out, count, PER_SCALE=NF4.block // 2, BLOCK=BLOCK)
    return out


@dequantize.register_fake
def _(packed: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    return packed.new_empty(2 * packed.numel(), dtype=dtype)


# --- Gradient of rows that were gathered several times ---


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
        while at < end:  # Triton's interpreter does not support a range over loaded numbers
            row = tl.load(order + at)
            total += tl.load(place + row * heads * width, inside, other=0.0).to(tl.float32)
            at += 1
    else:
        total = tl.load(place + token.to(tl.int64) * heads * width, inside, other=0.0)
    to = out + head.to(tl.int64) * n_tokens * width + token * width + column
    tl.store(to, total.to(out.dtype.element_ty), inside)


def sum_copies(gradient: Tensor, copies: tuple[Tensor, Tensor] | None, n_tokens: int) -> Tensor:
    """For each token, sum the rows of `gradient` (K, H, D) that are its copies, in fp32. The result (T, H, D) lies in
    memory head after head.

    Args:
        copies: positions of the copies of token 0, then of token 1 and so on, (K,), and the start of each token's
            copies, (T + 1,). None: each token has one copy, in order.
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
