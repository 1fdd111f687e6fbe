"""What weights in 4 bits stand for as one Triton kernel, which reads and writes each number once."""

# Triton gives its functions their types.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from armature.components.models.blockwise import NF4

BLOCK = 1024


@triton.jit
def _dequantize(packed, scales, codes, found, count, PER_SCALE: tl.constexpr, BLOCK: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * BLOCK
    place = start + tl.arange(0, BLOCK)
    inside = place < count
    pair = tl.load(packed + place, inside, other=0).to(tl.int32)
    scale = tl.load(scales + place // PER_SCALE, inside, other=0.0)
    numbers = tl.interleave(tl.load(codes + (pair >> 4)) * scale, tl.load(codes + (pair & 15)) * scale)
    both = 2 * start + tl.arange(0, 2 * BLOCK)
    tl.store(found + both, numbers.to(found.dtype.element_ty), both < 2 * count)


@torch.library.custom_op("armature::dequantize_nf4", mutates_args=())  # compiled layers do not look into it
def dequantize(packed: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """(2 * N,) numbers of which `packed` (uint8, N bytes) has two codes in a byte, the first in its upper half.

    Bit for bit as `NF4.dequantize`: code * scale in fp32, rounded once to `dtype`.
    """
    count = packed.numel()
    found = torch.empty(2 * count, dtype=dtype, device=packed.device)
    grid = (triton.cdiv(count, BLOCK),)
    table = NF4.table(packed.device)
    _dequantize[grid](packed, scales, table, found, count, PER_SCALE=NF4.block // 2, BLOCK=BLOCK)
    return found


@dequantize.register_fake
def _(packed: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    return packed.new_empty(2 * packed.numel(), dtype=dtype)
