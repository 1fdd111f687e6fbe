"""The update of a parameter in bf16 or fp16 as one Triton kernel, which reads and writes each number once."""

# Triton gives its functions their types.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024


@triton.jit
def _update(
    weight, gradient, first, second, rest, count, clip, keep, rate, share1, beta2, share2, eps, correction2,
    BLOCK: tl.constexpr, MASTER: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < count
    g = tl.load(gradient + place, inside).to(tl.float32) * clip
    m = tl.load(first + place, inside).to(tl.float32)
    v = tl.load(second + place, inside).to(tl.float32)
    w, r = tl.load(weight + place, inside), tl.load(rest + place, inside)
    if MASTER:
        exact = ((w.to(tl.int16, bitcast=True).to(tl.int32) << 16) + r.to(tl.int32)).to(tl.float32, bitcast=True)
    else:
        exact = w.to(tl.float32) + r.to(tl.float32)
    m += share1 * (g - m)
    v = v * beta2 + share2 * g * g
    exact *= keep
    exact -= rate * tl.div_rn(m, tl.sqrt_rn(tl.div_rn(v, correction2)) + eps)
    tl.store(first + place, m, inside)
    tl.store(second + place, v, inside)
    if MASTER:
        bits = exact.to(tl.int32, bitcast=True)
        high = (bits + 0x8000) >> 16
        tl.store(weight + place, high.to(tl.int16).to(weight.dtype.element_ty, bitcast=True), inside)
        tl.store(rest + place, (bits - (high << 16)).to(tl.int16), inside)
    else:
        rounded = exact.to(weight.dtype.element_ty)
        tl.store(weight + place, rounded, inside)
        tl.store(rest + place, exact - rounded.to(tl.float32), inside)


def update(
    weight: Tensor,
    gradient: Tensor,
    first: Tensor,
    second: Tensor,
    rest: Tensor,
    *,
    rate: float,
    decay: float,
    betas: tuple[float, float],
    eps: float,
    step: int,
    clip: float = 1.0,
) -> None:
    """As `components.training.optimizer.rounded_update`; all tensors but the gradient are contiguous.

    `rest` is the residual, or in int16 what `components.training.master_weights.split` takes from the weight.
    """
    count, (beta1, beta2) = weight.numel(), betas
    tensors = (weight, gradient.contiguous(), first, second, rest)
    # What is near 1 is subtracted from it here, in double precision.
    numbers = (clip, 1 - rate * decay, rate / (1 - beta1**step), 1 - beta1, beta2, 1 - beta2, eps, 1 - beta2**step)
    grid, master = (triton.cdiv(count, BLOCK),), rest.dtype == torch.int16
    _update[grid](*tensors, count, *numbers, BLOCK=BLOCK, MASTER=master)


def update_together(tensors: Sequence[Sequence[Tensor]], **numbers: Any) -> None:
    """Update many small parameters that share the same `numbers` with one kernel.

    Args:
        tensors: the weights, then the gradients and so on, in the order of `update`, each of one dtype.
    """
    flat = [torch.cat([tensor.flatten() for tensor in same]) for same in tensors]
    update(*flat, **numbers)
    sizes = [weight.numel() for weight in tensors[0]]
    for place in (0, 2, 3, 4):  # gradients stay
        pieces = zip(flat[place].split(sizes), tensors[place], strict=True)
        torch._foreach_copy_(list(tensors[place]), [piece.view_as(tensor) for piece, tensor in pieces])
