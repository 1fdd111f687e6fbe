"""Triton kernels of the action expert's attention over few queries, fused with the preceding norms and rotations."""

# Triton kernels cannot have type annotations.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

QUERIES = 64
"""Largest number of queries of a row; a Triton program holds all queries of a row and head."""
KEYS = 128
"""Number of keys that a Triton program reads at once."""


@triton.jit
def _normed(x, SIZE: tl.constexpr):
    return x * tl.rsqrt(tl.sum(x * x, 1) / SIZE + 1e-6)[:, None]


@triton.jit
def _rotated(place, inside, cos, sin, SIZE: tl.constexpr):
    """Load one head of each token, apply the RMS norm and the rotary rotation, and return its two halves separately."""
    dtype = place.dtype.element_ty
    first = tl.load(place, inside, 0.0).to(tl.float32)
    second = tl.load(place + SIZE // 2, inside, 0.0).to(tl.float32)
    root = tl.rsqrt((tl.sum(first * first, 1) + tl.sum(second * second, 1)) / SIZE + 1e-6)[:, None]
    first, second = (first * root).to(dtype).to(tl.float32), (second * root).to(dtype).to(tl.float32)
    return (first * cos - second * sin).to(dtype), (second * cos + first * sin).to(dtype)


@triton.jit
def _self_attention(
    qkv, cos, sin, out, count,
    SCALE: tl.constexpr, HEADS: tl.constexpr, SIZE: tl.constexpr, QUERIES: tl.constexpr, HALF: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """Compute the self-attention of one head in one row of the batch.

    All steps of a chunk fit into one block, so the softmax needs no running maximum.
    """
    row, head = tl.program_id(0).to(tl.int64) // HEADS, tl.program_id(0) % HEADS
    steps, halves, columns = tl.arange(0, QUERIES), tl.arange(0, HALF), tl.arange(0, WIDTH)
    inside = steps < count
    half = inside[:, None] & (halves < SIZE // 2)[None, :]
    whole = inside[:, None] & (columns < SIZE)[None, :]
    angle = steps[:, None] * (SIZE // 2) + halves[None, :]
    c, s = tl.load(cos + angle, half, 0.0), tl.load(sin + angle, half, 0.0)
    start = (row * count + steps)[:, None] * (3 * HEADS * SIZE) + head * SIZE
    q1, q2 = _rotated(qkv + start + halves[None, :], half, c, s, SIZE)
    k1, k2 = _rotated(qkv + start + HEADS * SIZE + halves[None, :], half, c, s, SIZE)
    v = tl.load(qkv + start + 2 * HEADS * SIZE + columns[None, :], whole, 0.0)
    scores = tl.dot(q1, tl.trans(k1), input_precision="ieee") + tl.dot(q2, tl.trans(k2), input_precision="ieee")
    scores = tl.where(inside[None, :], scores * SCALE, -float("inf"))
    weights = tl.exp(scores - tl.max(scores, 1)[:, None])
    seen = tl.dot(weights.to(v.dtype), v, input_precision="ieee") / tl.sum(weights, 1)[:, None]
    place = (row * count + steps)[:, None] * (HEADS * SIZE) + head * SIZE + columns[None, :]
    tl.store(out + place, seen.to(out.dtype.element_ty), whole)


@triton.jit
def _cross_attention(
    queries, keys, values, mask, out, count, length,
    key_row, key_head, key_token, value_row, value_head, value_token,
    SCALE: tl.constexpr, BLOCKS: tl.constexpr, HEADS: tl.constexpr, SIZE: tl.constexpr, QUERIES: tl.constexpr,
    WIDTH: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Compute the cross-attention of one head in one row of the batch.

    Keys and values are read in blocks, with an online softmax (running maximum and sum).
    """
    row, head = tl.program_id(0).to(tl.int64) // HEADS, tl.program_id(0) % HEADS
    steps, columns, tokens = tl.arange(0, QUERIES), tl.arange(0, WIDTH), tl.arange(0, KEYS)
    whole = (steps < count)[:, None] & (columns < SIZE)[None, :]
    place = (row * count + steps)[:, None] * (HEADS * SIZE) + head * SIZE + columns[None, :]
    dtype = queries.dtype.element_ty
    q = _normed(tl.load(queries + place, whole, 0.0).to(tl.float32), SIZE).to(dtype)
    best = tl.full([QUERIES], -1e30, tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    seen = tl.zeros([QUERIES, WIDTH], tl.float32)
    keys += row * key_row + head * key_head
    values += row * value_row + head * value_head
    for block in range(BLOCKS):
        token = block * KEYS + tokens
        inside = token < length
        read = inside[:, None] & (columns < SIZE)[None, :]
        k = tl.load(keys + token[:, None] * key_token + columns[None, :], read, 0.0)
        v = tl.load(values + token[:, None] * value_token + columns[None, :], read, 0.0)
        shown = tl.load(mask + row * length + token, inside, 0).to(tl.int1)
        scores = tl.where(shown[None, :], tl.dot(q, tl.trans(k), input_precision="ieee") * SCALE, -float("inf"))
        largest = tl.maximum(best, tl.max(scores, 1))
        weights = tl.exp(scores - largest[:, None])
        shrunk = tl.exp(best - largest)
        total = total * shrunk + tl.sum(weights, 1)
        seen = seen * shrunk[:, None] + tl.dot(weights.to(dtype), v, input_precision="ieee")
        best = largest
    tl.store(out + place, (seen / total[:, None]).to(out.dtype.element_ty), whole)


def self_attention(qkv: Tensor, cos: Tensor, sin: Tensor, heads: int) -> Tensor:
    """Compute self-attention among the steps of a row, without a mask; returns (N, T, hidden).

    Args:
        qkv: Queries, keys and values before norms and rotation, (N, T, 3 hidden); T is at most `QUERIES`.
        cos, sin: (T, head size / 2) float32.
    """
    rows, count, joined = qkv.shape
    size = joined // (3 * heads)
    out = qkv.new_empty(rows, count, heads * size)
    _self_attention[(rows * heads,)](
        qkv.contiguous(), cos, sin, out, count,
        SCALE=size**-0.5, HEADS=heads, SIZE=size, QUERIES=_padded(count), HALF=_padded(size // 2), WIDTH=_padded(size),
    )  # fmt: skip
    return out


def cross_attention(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    """Compute cross-attention of the queries of a row to its context; returns (E, Q, hidden).

    Args:
        queries: Queries before their norm, (E, Q, hidden); Q is at most `QUERIES`.
        keys, values: (E, heads, S, head size).
        mask: (E, 1, 1, S) bool, True for at least one key of each row.
    """
    rows, count, hidden = queries.shape
    heads, length, size = keys.shape[1:]
    assert keys.stride(3) == values.stride(3) == 1
    out = queries.new_empty(rows, count, hidden)
    _cross_attention[(rows * heads,)](
        queries.contiguous(), keys, values, mask.contiguous(), out, count, length,
        *keys.stride()[:3], *values.stride()[:3],
        SCALE=size**-0.5, BLOCKS=-(-length // KEYS), HEADS=heads, SIZE=size, QUERIES=_padded(count),
        WIDTH=_padded(size), KEYS=KEYS,
    )  # fmt: skip
    return out


def _padded(size: int) -> int:
    """Round `size` up to a power of two, and to at least 16: Triton's matrix products require such sizes."""
    return max(16, 1 << (size - 1).bit_length())
