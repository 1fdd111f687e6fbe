"""Matrix products whose sums stay in fp32 where the factors are bf16."""

from __future__ import annotations

import torch
from torch import Tensor


def linear(bias: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """bias + scale a b in the dtype of `bias`; on GPUs no product of bf16 numbers is rounded to bf16 on its way."""
    if a.dtype == bias.dtype:
        return torch.addmm(bias, a, b, alpha=scale)
    if a.is_cuda:
        return torch.addmm(bias, a, b, alpha=scale, out_dtype=bias.dtype)
    return (a @ b).to(bias.dtype).mul_(scale).add_(bias)


def product(a: Tensor, b: Tensor, out: Tensor) -> Tensor:
    """out = a b, likewise."""
    if a.dtype == out.dtype:
        return torch.mm(a, b, out=out)
    if a.is_cuda:
        return torch.mm(a, b, out_dtype=out.dtype, out=out)
    return out.copy_(a @ b)


def add_product(out: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """out += a b, likewise."""
    if a.dtype == out.dtype:
        return torch.addmm(out, a, b, out=out)
    if a.is_cuda:
        return torch.addmm(out, a, b, out_dtype=out.dtype, out=out)
    return out.add_(a @ b)
