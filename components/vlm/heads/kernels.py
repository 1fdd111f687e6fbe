"""Triton kernels of the output head. Logits exist only as tiles in registers.

A tile is stored as three numbers per row, as its gradient, or as exp(z - m), from which the gradient can be computed. A
program owns a tile of rows (tokens) x columns (vocabulary). The matrix product over D runs in tensor cores with an fp32
accumulator; softcap, temperature and the exclusion of forbidden tokens follow in registers.
"""

# Triton gives its functions their types.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl

EXCLUDED = tl.constexpr(-1e30)


@triton.jit
def _place(n_rows, n_columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr, GROUP: tl.constexpr):
    """Return the first row and the first column of this program's tile.

    Up to GROUP consecutive programs have the same columns, which they share in the L2 cache.
    """
    program = tl.program_id(0)
    row_tiles, column_tiles = tl.cdiv(n_rows, ROWS), tl.cdiv(n_columns, COLUMNS)
    group = program // (GROUP * column_tiles)
    first = group * GROUP
    size = min(row_tiles - first, GROUP)
    inside = program % (GROUP * column_tiles)
    return (first + inside % size) * ROWS, (inside // size) * COLUMNS


@triton.jit
def _logits(
    hidden, weight, bias, forbidden, row, column, n_rows, n_columns, scale, softcap, depth: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
    BIAS: tl.constexpr, SOFTCAP: tl.constexpr, DESCRIPTORS: tl.constexpr,
):  # fmt: skip
    """Return the tile's logits after softcap and temperature.

    Also return the tanh of the softcap, or without a softcap the plain logits.
    """
    z = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    if DESCRIPTORS:
        for start in range(0, depth, DEPTH):
            z = tl.dot(hidden.load([row, start]), weight.load([column, start]).T, z)
    else:
        steps = tl.arange(0, DEPTH)
        # Rows past the end read other rows instead of being masked; their results are not stored.
        h = hidden + ((row + tl.arange(0, ROWS)) % n_rows).to(tl.int64)[:, None] * depth + steps[None, :]
        w = weight + ((column + tl.arange(0, COLUMNS)) % n_columns).to(tl.int64)[None, :] * depth + steps[:, None]
        for start in range(0, depth, DEPTH):
            if depth % DEPTH == 0:
                z = tl.dot(tl.load(h), tl.load(w), z, input_precision="ieee")
            else:
                left = depth - start
                a = tl.load(h, mask=steps[None, :] < left, other=0.0)
                b = tl.load(w, mask=steps[:, None] < left, other=0.0)
                z = tl.dot(a, b, z, input_precision="ieee")
            h += DEPTH
            w += DEPTH
    columns = column + tl.arange(0, COLUMNS)
    valid = columns < n_columns
    if BIAS:
        z += tl.load(bias + columns, mask=valid, other=0.0)[None, :]
    bent = z
    if SOFTCAP:
        bent = 2 * tl.sigmoid(2 * z / softcap) - 1
        z = bent * softcap
    allowed = tl.load(forbidden + columns, mask=valid, other=1) == 0
    return tl.where(allowed[None, :], z * scale, EXCLUDED), bent


@triton.jit
def statistics_kernel(
    hidden, weight, bias, forbidden, targets, maximum, total, weighted, chosen, scaled,
    n_rows, n_columns, scale, softcap, depth: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, GROUP: tl.constexpr,
    BIAS: tl.constexpr, SOFTCAP: tl.constexpr, DESCRIPTORS: tl.constexpr,
    KEEP: tl.constexpr,
):  # fmt: skip
    """For each row of a tile store its largest logit m, sum exp(z - m), sum exp(z - m) (z - m), and its target's logit.

    With KEEP also store the tile of exp(z - m) in `scaled` (n_rows, n_columns).
    """
    row, column = _place(n_rows, n_columns, ROWS, COLUMNS, GROUP)
    z, _ = _logits(
        hidden, weight, bias, forbidden, row, column, n_rows, n_columns, scale, softcap, depth,
        ROWS, COLUMNS, DEPTH, BIAS, SOFTCAP, DESCRIPTORS,
    )  # fmt: skip
    rows = row + tl.arange(0, ROWS)
    valid = rows < n_rows
    m = tl.max(z, 1)
    below = z - m[:, None]
    e = tl.exp(below)
    place = (column // COLUMNS).to(tl.int64) * n_rows + rows
    tl.store(maximum + place, m, mask=valid)
    tl.store(total + place, tl.sum(e, 1), mask=valid)
    tl.store(weighted + place, tl.sum(e * below, 1), mask=valid)
    target = tl.load(targets + rows, mask=valid, other=-1).to(tl.int32) - column
    hit = tl.arange(0, COLUMNS)[None, :] == target[:, None]
    here = valid & (target >= 0) & (target < COLUMNS)
    tl.store(chosen + rows, tl.sum(tl.where(hit, z, 0.0), 1), mask=here)
    if KEEP:
        columns = column + tl.arange(0, COLUMNS)
        to = scaled + rows.to(tl.int64)[:, None] * n_columns + columns[None, :]
        tl.store(to, e.to(scaled.dtype.element_ty), mask=valid[:, None] & (columns[None, :] < n_columns))


@triton.jit
def gradient_kernel(
    hidden, weight, bias, forbidden, targets, normalizer, entropy, d_logprobs, d_entropy, dz,
    n_rows, n_columns, scale, softcap, depth: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, GROUP: tl.constexpr,
    BIAS: tl.constexpr, SOFTCAP: tl.constexpr, DESCRIPTORS: tl.constexpr,
    ENTROPY: tl.constexpr,
):  # fmt: skip
    """Store in `dz` (rows, columns) the loss's gradient with respect to the output of the linear layer."""
    row, column = _place(n_rows, n_columns, ROWS, COLUMNS, GROUP)
    z, bent = _logits(
        hidden, weight, bias, forbidden, row, column, n_rows, n_columns, scale, softcap, depth,
        ROWS, COLUMNS, DEPTH, BIAS, SOFTCAP, DESCRIPTORS,
    )  # fmt: skip
    rows, columns = row + tl.arange(0, ROWS), column + tl.arange(0, COLUMNS)
    valid = rows < n_rows
    log_p = z - tl.load(normalizer + rows, mask=valid, other=0.0)[:, None]
    p = tl.exp(log_p)
    g = tl.load(d_logprobs + rows, mask=valid, other=0.0)[:, None]
    target = tl.load(targets + rows, mask=valid, other=-1).to(tl.int32)
    gradient = tl.where(columns[None, :] == target[:, None], g, 0.0) - p * g
    if ENTROPY:
        slope = tl.load(d_entropy + rows, mask=valid, other=0.0)[:, None]
        gradient -= p * slope * (log_p + tl.load(entropy + rows, mask=valid, other=0.0)[:, None])
    if SOFTCAP:
        gradient *= 1 - bent * bent
    place = dz + rows.to(tl.int64)[:, None] * n_columns + columns[None, :]
    inside = valid[:, None] & (columns[None, :] < n_columns)
    tl.store(place, (gradient * scale).to(dz.dtype.element_ty), mask=inside)


@triton.jit
def kept_gradient_kernel(
    scaled, maximum, targets, normalizer, entropy, d_logprobs, d_entropy,
    n_rows, n_columns, scale, softcap,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, SOFTCAP: tl.constexpr, ENTROPY: tl.constexpr,
):  # fmt: skip
    """Compute the same as `gradient_kernel` from the values that `statistics_kernel` stored in `scaled`, in place.

    COLUMNS must be the same as in `statistics_kernel`.
    """
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    valid = rows < n_rows
    place = scaled + rows.to(tl.int64)[:, None] * n_columns + columns[None, :]
    inside = valid[:, None] & (columns[None, :] < n_columns)
    e = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    m = tl.load(maximum + tl.program_id(0).to(tl.int64) * n_rows + rows, mask=valid, other=0.0)
    shift = m - tl.load(normalizer + rows, mask=valid, other=0.0)
    p = e * tl.exp(shift)[:, None]
    g = tl.load(d_logprobs + rows, mask=valid, other=0.0)[:, None]
    target = tl.load(targets + rows, mask=valid, other=-1).to(tl.int32)
    gradient = tl.where(columns[None, :] == target[:, None], g, 0.0) - p * g
    below = tl.log(tl.where(e > 0, e, 1.0))
    if ENTROPY:
        slope = tl.load(d_entropy + rows, mask=valid, other=0.0)[:, None]
        log_p = below + shift[:, None]
        gradient -= p * slope * (log_p + tl.load(entropy + rows, mask=valid, other=0.0)[:, None])
    if SOFTCAP:
        # In a tile without an allowed token m is EXCLUDED.
        bent = tl.where(m[:, None] > EXCLUDED / 2, (below + m[:, None]) / (softcap * scale), 0.0)
        gradient *= 1 - bent * bent
    tl.store(place, (gradient * scale).to(scaled.dtype.element_ty), mask=inside)
