"""Triton kernels of an optimizer step: gradient accumulation, AdamW, and moments in 8 bits.

Each reads and writes every number once.
"""

# Triton gives its functions their types.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import pad

from armature.components.models.blockwise import SIGNED, UNSIGNED, Codes
from armature.components.models.context_parallel import to_device

BLOCK = 1024
CHUNK = 32 * BLOCK
"""Number of elements of a parameter that one program of the update kernel processes."""
COLUMNS = 9
"""Number of columns in a parameter's row of the kernel's table.

They are five pointers, the parameter's number of elements, the number of the first program that updates it, and
pointers to the scales of moments in 8 bits.
"""
ALIGNED = 16
"""Alignment of pointers in bytes. If all are multiples of it, several elements are read and written at once."""
TYPES = {
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
    torch.int16: tl.int16,
    torch.uint8: tl.uint8,
}


@triton.jit
def _add(total, gradient, count, BLOCK: tl.constexpr, MORE: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < count
    value = tl.load(gradient + place, inside).to(tl.float32)
    if MORE:
        value += tl.load(total + place, inside)
    tl.store(total + place, value, inside)


def add(total: Tensor, gradient: Tensor, more: bool) -> None:
    """Compute total += gradient, or total = gradient if `more` is False. `total` is fp32 and contiguous."""
    count = total.numel()
    if count:
        _add[(triton.cdiv(count, BLOCK),)](total, gradient.contiguous(), count, BLOCK=BLOCK, MORE=more)


# --- Moments in 8 bits ---

LEVELS = 8
"""Depth of the search tree, for codes of 8 bits."""
ROWS = 8
"""Number of blocks with a scale each that one program processes."""


@triton.jit
def _places(count, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    place = row[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    return row, place, row * BLOCK < count, place < count


@triton.jit
def _nearest(numbers, tree, least, LEVELS: tl.constexpr):
    largest = tl.max(tl.abs(numbers), 1)
    share = tl.div_rn(numbers, tl.where(largest > 0, largest, 1.0)[:, None])
    node = tl.zeros_like(numbers).to(tl.int32)
    for _ in tl.static_range(LEVELS):
        node = 2 * node + 1 + (share > tl.load(tree + node)).to(tl.int32)
    index = node - ((1 << LEVELS) - 1)
    return tl.where((numbers > 0) & (index < least), least, index).to(tl.uint8), largest


@triton.jit
def _dequantize(indices, scales, table, out, count, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    row, place, has_scale, inside = _places(count, ROWS, BLOCK)
    code = tl.load(table + tl.load(indices + place, inside, other=0).to(tl.int32))
    tl.store(out + place, code * tl.load(scales + row, has_scale, other=0.0)[:, None], inside)


@triton.jit
def _quantize(
    numbers, tree, indices, scales, count, least, ROWS: tl.constexpr, BLOCK: tl.constexpr, LEVELS: tl.constexpr
):
    row, place, has_scale, inside = _places(count, ROWS, BLOCK)
    index, largest = _nearest(tl.load(numbers + place, inside, other=0.0), tree, least, LEVELS)
    tl.store(indices + place, index, inside)
    tl.store(scales + row, largest, has_scale)


def dequantize(indices: Tensor, scales: Tensor, codes: Codes) -> Tensor:
    """Return what `Codes.dequantize` returns in fp32, bit for bit. `indices` are contiguous."""
    out, count = torch.empty_like(indices, dtype=torch.float32), indices.numel()
    programs = (triton.cdiv(count, ROWS * codes.block),)
    _dequantize[programs](indices, scales, codes.table(out.device), out, count, ROWS=ROWS, BLOCK=codes.block)
    return out


def quantize(numbers: Tensor, codes: Codes, indices: Tensor, scales: Tensor, least: int = 0) -> None:
    """Write what `Codes.quantize` returns for finite `numbers`, bit for bit, to `indices` and `scales`.

    Args:
        numbers, indices: fp32 and uint8, contiguous.
        codes: 256 codes.
        least: smallest index of a positive number.
    """
    count, tree = numbers.numel(), _search_tree(codes, numbers.device)
    programs = (triton.cdiv(count, ROWS * codes.block),)
    _quantize[programs](numbers, tree, indices, scales, count, least, ROWS=ROWS, BLOCK=codes.block, LEVELS=LEVELS)


@cache
def _search_tree(codes: Codes, device: torch.device) -> Tensor:
    """Return the 255 numbers halfway between the codes as a binary tree: the children of node n are 2 n + 1 and
    2 n + 2."""
    values = codes.table(device)
    between = (values[1:] + values[:-1]) / 2
    halves = [2 ** (LEVELS - 1 - level) for level in range(LEVELS)]
    return torch.cat([between[half - 1 :: 2 * half] for half in halves])


# --- AdamW ---


@triton.jit
def _update(
    table, owners, codes, clip, keep, rate, share1, beta2, share2, eps, correction2,
    WEIGHT: tl.constexpr, GRADIENT: tl.constexpr, MOMENT: tl.constexpr, REST: tl.constexpr,
    MASTER: tl.constexpr, SHARED: tl.constexpr, LEVELS: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr,
    CHUNK: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    table += tl.load(owners + program) * COLUMNS
    weight = tl.load(table).to(tl.pointer_type(WEIGHT))
    gradient = tl.load(table + 1).to(tl.pointer_type(GRADIENT))
    first = tl.load(table + 2).to(tl.pointer_type(MOMENT))
    second = tl.load(table + 3).to(tl.pointer_type(MOMENT))
    rest = tl.load(table + 4).to(tl.pointer_type(REST))
    count = tl.load(table + 5)
    start = (program - tl.load(table + 6)) * CHUNK
    scale1 = tl.load(table + 7).to(tl.pointer_type(tl.float32))
    scale2 = tl.load(table + 8).to(tl.pointer_type(tl.float32))
    end = tl.minimum(start + CHUNK, count)
    while start + BLOCK <= end:
        _block(
            weight, gradient, first, second, rest, scale1, scale2, codes, start, count, clip, keep, rate, share1,
            beta2, share2, eps, correction2, MASTER, SHARED, LEVELS, ALIGNED, BLOCK, False,
        )  # fmt: skip
        start += BLOCK
    if start < end:
        _block(
            weight, gradient, first, second, rest, scale1, scale2, codes, start, count, clip, keep, rate, share1,
            beta2, share2, eps, correction2, MASTER, SHARED, LEVELS, ALIGNED, BLOCK, True,
        )  # fmt: skip


@triton.jit
def _block(
    weight, gradient, first, second, rest, scale1, scale2, codes, start, count, clip, keep, rate, share1, beta2, share2,
    eps, correction2, MASTER: tl.constexpr, SHARED: tl.constexpr, LEVELS: tl.constexpr, ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr, PARTIAL: tl.constexpr,
):  # fmt: skip
    place = start + tl.arange(0, BLOCK)
    inside = None
    if PARTIAL:
        inside = place < count
    weight, gradient, rest = weight + place, gradient + place, rest + place
    first, second = first + place, second + place
    if ALIGNED:
        weight, gradient = tl.multiple_of(weight, ALIGNED), tl.multiple_of(gradient, ALIGNED)
        first, second = tl.multiple_of(first, ALIGNED), tl.multiple_of(second, ALIGNED)
        rest = tl.multiple_of(rest, ALIGNED)
    g = tl.load(gradient, inside).to(tl.float32) * clip
    m, v = tl.load(first, inside), tl.load(second, inside)
    if SHARED:  # any byte is a code, also where there is no element
        m = tl.load(codes + m.to(tl.int32)) * tl.load(scale1 + place // SHARED, inside)
        v = tl.load(codes + (1 << LEVELS) + v.to(tl.int32)) * tl.load(scale2 + place // SHARED, inside)
    m, v = m.to(tl.float32), v.to(tl.float32)
    w, r = tl.load(weight, inside), tl.load(rest, inside)
    if MASTER:
        exact = ((w.to(tl.int16, bitcast=True).to(tl.int32) << 16) + r.to(tl.int32)).to(tl.float32, bitcast=True)
    else:
        exact = w.to(tl.float32) + r.to(tl.float32)
    m += share1 * (g - m)
    v = v * beta2 + share2 * g * g
    exact *= keep
    exact -= rate * tl.div_rn(m, tl.sqrt_rn(tl.div_rn(v, correction2)) + eps)
    if SHARED:
        if PARTIAL:
            m, v = tl.where(inside, m, 0.0), tl.where(inside, v, 0.0)
        row = start // SHARED + tl.arange(0, BLOCK // SHARED)
        trees = codes + (2 << LEVELS)
        m, largest1 = _nearest(tl.reshape(m, (BLOCK // SHARED, SHARED)), trees, 0, LEVELS)
        v, largest2 = _nearest(tl.reshape(v, (BLOCK // SHARED, SHARED)), trees + (1 << LEVELS), 1, LEVELS)
        tl.store(scale1 + row, largest1, row * SHARED < count)
        tl.store(scale2 + row, largest2, row * SHARED < count)
        m, v = tl.reshape(m, (BLOCK,)), tl.reshape(v, (BLOCK,))
    tl.store(first, m, inside)
    tl.store(second, v, inside)
    if MASTER:
        bits = exact.to(tl.int32, bitcast=True)
        high = (bits + 0x8000) >> 16
        tl.store(weight, high.to(tl.int16).to(weight.dtype.element_ty, bitcast=True), inside)
        tl.store(rest, (bits - (high << 16)).to(tl.int16), inside)
    else:
        rounded = exact.to(weight.dtype.element_ty)
        tl.store(weight, rounded, inside)
        tl.store(rest, exact - rounded.to(tl.float32), inside)


def update(
    weights: Sequence[Tensor],
    gradients: Sequence[Tensor],
    firsts: Sequence[Tensor],
    seconds: Sequence[Tensor],
    rests: Sequence[Tensor],
    *,
    rate: float,
    decay: float,
    betas: tuple[float, float],
    eps: float,
    step: int,
    clip: float = 1.0,
    scales: Sequence[Sequence[Tensor]] | None = None,
) -> None:
    """Apply `armature.components.training.optimizer.rounded_update` to many parameters with one kernel launch.

    All parameters share one launch, because the host needs longer to launch hundreds of kernels than the GPU needs to
    update small parameters.

    Args:
        weights, gradients, firsts, seconds, rests: one tensor per parameter; the tensors of each sequence share a
            dtype, and all but the gradients are contiguous. `rests` are the residuals, or int16 lower halves as
            `armature.components.training.optimizer.split` makes them.
        scales: for moments in 8 bits, the scales of `firsts` and of `seconds`.
    """
    gradients = [gradient.contiguous() for gradient in gradients]
    columns = weights, gradients, firsts, seconds, rests
    counts = torch.tensor([weight.numel() for weight in weights])
    programs = (counts + CHUNK - 1) // CHUNK
    pointers = torch.tensor([[tensor.data_ptr() for tensor in same] for same in (*columns, *(scales or columns[2:4]))])
    table = torch.stack([*pointers[:5], counts, programs.cumsum(0) - programs, *pointers[5:]], dim=1)
    owners = torch.repeat_interleave(programs.int())
    if not len(owners):
        return
    device, (beta1, beta2) = weights[0].device, betas
    # Subtract from 1 here, in double precision: in fp32 the small differences would lose digits.
    numbers = (clip, 1 - rate * decay, rate / (1 - beta1**step), 1 - beta1, beta2, 1 - beta2, eps, 1 - beta2**step)
    types = (TYPES[same[0].dtype] for same in (weights, gradients, firsts, rests))
    _update[(len(owners),)](
        to_device(table, device), to_device(owners, device), _codes(device) if scales else None, *numbers, *types,
        MASTER=rests[0].dtype == torch.int16, SHARED=SIGNED.block if scales else 0, LEVELS=LEVELS,
        ALIGNED=0 if (pointers % ALIGNED).any() else ALIGNED, BLOCK=BLOCK, CHUNK=CHUNK, COLUMNS=COLUMNS,
    )  # fmt: skip


@cache
def _codes(device: torch.device) -> Tensor:
    """Return the codes of first and second moments, and their search trees: four times 256 numbers."""
    return torch.cat(
        [
            *(codes.table(device) for codes in (SIGNED, UNSIGNED)),
            *(pad(_search_tree(codes, device), (0, 1)) for codes in (SIGNED, UNSIGNED)),
        ]
    )
