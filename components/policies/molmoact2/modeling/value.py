"""The value of what a policy sees: how much reward is still to come."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from armature.components.policies.molmoact2.modeling.layers import precise, rms


class ValueHead(nn.Module):
    """V = MLP(mean over the chunk of the action expert's last states, normed), in float32.

    Of a policy that answers with action tokens it reads the VLM's last state of the prompt instead.

    Its input has no gradient, so that it never changes the policy. A fresh one gives 0 for everything.

    Args:
        size: hidden, of the states, and of the two layers in between.
        seed: of the weights.
    """

    def __init__(self, size: int, seed: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(size, size), nn.SiLU(), nn.Linear(size, size), nn.SiLU(), nn.Linear(size, 1)
        )
        generator = torch.Generator().manual_seed(seed)
        for layer in self.layers:
            if isinstance(layer, nn.Linear):
                nn.init.xavier_uniform_(layer.weight, generator=generator)
                nn.init.zeros_(layer.bias)
        nn.init.zeros_(self.layers[-1].weight)  # type: ignore[arg-type]

    def forward(self, states: Tensor) -> Tensor:
        """(N,) float32, of states (N, T, hidden)."""
        with torch.autocast(states.device.type, enabled=False):
            y: Tensor = self.layers(rms(precise(states.detach())).mean(1))
        return y.squeeze(-1)
