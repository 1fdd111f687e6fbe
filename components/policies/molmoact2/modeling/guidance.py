"""Chunks that go on where the robot is: real-time chunking (Black et al. 2025, arXiv 2506.07339).

While a chunk is computed the robot carries out the one before. The velocity of flow matching is pulled to what is left
of that chunk, Y: with the estimate A1(x) = x + (1 - t) v(x, t) of the actions, weights w of the steps and time t, from
noise (0) to actions (1),

    v + min(beta, (t^2 + (1 - t)^2) / (t (1 - t))) (Y - A1)^T diag(w) dA1/dx
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

MOST_GUIDANCE = 5.0
"""beta of the paper."""


def prefix_weights(delay: int, left: int, horizon: int) -> Tensor:
    """(horizon,) float32: 1 for the `delay` steps that are carried out meanwhile, falling to 0 at step `left`."""
    step = torch.arange(horizon, dtype=torch.float64)
    falling = ((left - step) / (left - delay + 1)).clamp(0, 1)
    return (falling * torch.expm1(falling) / math.expm1(1)).float()


def guided_velocity(
    velocity: Callable[[Tensor], Tensor], x: Tensor, time: float, wanted: Tensor, weights: Tensor
) -> Tensor:
    """The velocity at x (N, T, D), pulled to `wanted` (N, T, D) by `weights` (N, T); without a gradient."""
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        own = velocity(x)
        estimate = x + (1 - time) * own
        (pull,) = torch.autograd.grad(estimate, x, (wanted - estimate.detach()) * weights[..., None])
    scale = min(MOST_GUIDANCE, (time**2 + (1 - time) ** 2) / (time * (1 - time))) if time else MOST_GUIDANCE
    return own.detach() + scale * pull
