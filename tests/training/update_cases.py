"""The same updates of a half-precision parameter by the Triton kernel and by plain torch operations."""

from __future__ import annotations

import torch
from torch import Tensor

from armature.components.training.kernels import update
from armature.components.training.optimizer import rounded_update


def both_after(
    steps: int, shape: tuple[int, ...], dtype: torch.dtype, device: str
) -> tuple[list[Tensor], list[Tensor]]:
    """Update a parameter `steps` times in two ways: by the kernel, and by plain torch operations.

    Return, for each way, the list [weight, first moment, second moment, residual] after the updates.
    """
    random = torch.Generator().manual_seed(0)
    weight = torch.randn(shape, generator=random).to(device, dtype)
    states = [[weight.clone(), *(torch.zeros_like(weight) for _ in range(3))] for _ in range(2)]
    for step in range(1, steps + 1):
        gradient = torch.randn(shape[::-1], generator=random).to(device, dtype).T
        numbers = {"rate": 1e-3, "decay": 0.1, "betas": (0.9, 0.95), "eps": 1e-6, "step": step}
        weight, *others = states[0]
        update([weight], [gradient], *([other] for other in others), **numbers)
        weight, *others = states[1]
        rounded_update(weight, gradient, *others, **numbers)
    return states[0], states[1]
