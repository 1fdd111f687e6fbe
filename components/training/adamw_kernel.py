"""The update of a parameter in bf16 or fp16 as one Triton kernel, which reads and writes each number once."""

# Triton gives its functions their types.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024


@triton.jit
def _update(
    weight, gradient, first, second, residual, count, rate, decay, beta1, beta2, eps, correction1, correction2,
    BLOCK: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < count
    g = tl.load(gradient + place, inside).to(tl.float32)
    m = tl.load(first + place, inside).to(tl.float32)
    v = tl.load(second + place, inside).to(tl.float32)
    exact = tl.load(weight + place, inside).to(tl.float32) + tl.load(residual + place, inside).to(tl.float32)
    m += (1 - beta1) * (g - m)
    v = v * beta2 + (1 - beta2) * g * g
    exact *= 1 - rate * decay
    exact -= rate / correction1 * tl.div_rn(m, tl.sqrt_rn(tl.div_rn(v, correction2)) + eps)
    rounded = exact.to(weight.dtype.element_ty)
    tl.store(first + place, m, inside)
    tl.store(second + place, v, inside)
    tl.store(weight + place, rounded, inside)
    tl.store(residual + place, exact - rounded.to(tl.float32), inside)


def update(
    weight: Tensor,
    gradient: Tensor,
    first: Tensor,
    second: Tensor,
    residual: Tensor,
    *,
    rate: float,
    decay: float,
    betas: tuple[float, float],
    eps: float,
    step: int,
) -> None:
    """As `components.training.optimizer.rounded_update`; all tensors but the gradient are contiguous."""
    count, (beta1, beta2) = weight.numel(), betas
    tensors = (weight, gradient.contiguous(), first, second, residual)
    numbers = (rate, decay, beta1, beta2, eps, 1 - beta1**step, 1 - beta2**step)
    _update[(triton.cdiv(count, BLOCK),)](*tensors, count, *numbers, BLOCK=BLOCK)
