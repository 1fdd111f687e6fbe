"""Products of tokens with the weights of their experts, grouped by expert: one product for all experts, in place of one
for each.

This is transformers' `grouped_mm` (5.23) with two differences. Under autocast, weights have autocast's dtype, as in the
plain loop over experts; transformers multiplies fp32 weights in fp32 then. And the gradient of a token, which several
experts read, is a plain sum of rows, not the accumulation by index of PyTorch's own backward pass.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import grouped_mm
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from armature.components.models.varlen import under_autocast

GROUPED = "grouped"
"""Name under which these products are registered in transformers. The loop over experts is "eager"."""


@torch.compiler.disable
def grouped_products(experts: nn.Module, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """Return the weighted sum of the outputs of each token's experts, shape and dtype of `hidden`.

    Args:
        experts: has `gate_up_proj` (E, 2 I, D) and `down_proj` (E, D, I).
        hidden: (T, D).
        chosen: (T, k) integers, the experts of each token.
        weights: (T, k).
    """
    some: Any = experts
    gate_up, down = under_autocast(some.gate_up_proj, some.down_proj)
    numbers, order = chosen.flatten().sort(stable=True)
    back = order.argsort()
    ends = torch.searchsorted(numbers, torch.arange(len(down), device=numbers.device), right=True, out_int32=True)
    x = _Rows.apply(hidden.to(down.dtype), order, back, chosen.shape[1])
    x = some._apply_gate(product(x, gate_up.mT, ends))
    x = _Rows.apply(product(x, down.mT, ends), back, order, 1)
    return (x.view(*chosen.shape, -1) * weights[..., None]).sum(1, dtype=hidden.dtype)


def product(x: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """Multiply rows up to the first of `ends` (E,) by the first of `weights` (E, D, C), and so on."""
    if len(x) and x.dtype != torch.float64:
        return grouped_mm(x, weights, offs=ends)
    parts = x.tensor_split(ends[:-1].tolist())  # PyTorch (2.13) has no grouped products in float64, or of nothing
    return torch.cat([part @ weight for part, weight in zip(parts, weights, strict=True)])


class _Rows(torch.autograd.Function):
    """Rows of `x` (T, D), each `repeats` times, in another order, and back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, back: Tensor, repeats: int) -> Tensor:
        """Return (T repeats, D): for each number n in `order` the row n // repeats of `x`."""
        ctx.save_for_backward(back)
        ctx.repeats = repeats
        return x[order // repeats]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        """Return the gradient of `x`. `back` is the inverse of `order`."""
        rows = gradient[ctx.saved_tensors[0]]
        return rows if ctx.repeats == 1 else rows.unflatten(0, (-1, ctx.repeats)).sum(1), None, None, None


ALL_EXPERTS_FUNCTIONS.register(GROUPED, grouped_products)
