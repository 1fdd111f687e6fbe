"""RMS normalization and rotary positions, computed in float32 or better whatever the input's dtype."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional


def precise(x: Tensor) -> Tensor:
    """As float32; float64 stays."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def rms(x: Tensor) -> Tensor:
    """x / sqrt(mean(x^2) + 1e-6) over the last dimension, in the input's dtype."""
    return functional.rms_norm(precise(x), x.shape[-1:], eps=1e-6).to(x.dtype)


class RMSNorm(nn.Module):
    """The weight multiplies before the result is rounded to the input's dtype; transformers' Molmo2 rounds first."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return functional.rms_norm(precise(x), x.shape[-1:], precise(self.weight), self.eps).to(x.dtype)


def rotary_angles(positions: Tensor, size: int, base: float) -> Tensor:
    """(..., size / 2) float32: position times base^(-i / (size / 2))."""
    exponents = torch.arange(0, size, 2, dtype=torch.float32, device=positions.device) / size
    return positions.float()[..., None] * (1.0 / base**exponents)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (i, i + size / 2) of the last dimension by angles whose cosines and sines are given."""
    first, second = precise(x).chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)
