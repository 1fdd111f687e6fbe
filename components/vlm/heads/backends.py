"""The backends of `[trainer] logits`: each maps hidden states to log-probs and entropies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from armature.components.machine.registry import Registry

# From hidden states to log-probs and entropies: one backend for each value of `[trainer] logprobs`.

EXCLUDED = -1e30
"""Logit of a forbidden token: exp gives 0, and 0 times it is 0, unlike with -inf."""


@dataclass(frozen=True)
class HeadSettings:
    """What the logits of an output head go through before the softmax, and how many of them exist at once.

    z = cap tanh((h W^T + b) / cap) / temperature, without the hyperbola where `softcap` is None.
    """

    temperature: float
    softcap: float | None
    chunk_tokens: int


class Backend(Protocol):
    """Made from the settings, the output head it will be called with, and the device.

    Raises:
        ConfigurationError: this backend cannot do that.
    """

    def __init__(self, settings: HeadSettings, head: nn.Module, device: torch.device) -> None: ...

    def __call__(self, head: nn.Module, hidden: Tensor, targets: Tensor, forbidden: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probs of `targets` and entropies, (N,) each in fp32 or better, with gradients.

        Args:
            hidden: (N, D); N may be 0, and then the head has a gradient of 0, not none.
            targets: (N,) token ids. One that is forbidden, or beyond the head's rows, gets -inf and no gradient.
            forbidden: (V,) bool, tokens without probability.
        """


HEADS = Registry(
    "log-prob backend",
    "armature.logprobs",
    {
        "normal": "armature.components.vlm.heads.backends:StandardHead",
        "torch": "armature.components.vlm.heads.linear:ChunkedHead",
        "triton": "armature.components.vlm.heads.fused:FusedHead",
    },
)


# Log-probs from the logits of all trained tokens: any kind of head, and the plainest form to compare with.


class StandardHead:
    """The head as the model applies it. Several (N, V) tensors live until the backward pass."""

    def __init__(self, settings: HeadSettings, head: nn.Module, device: torch.device) -> None:
        self.settings = settings

    def __call__(self, head: nn.Module, hidden: Tensor, targets: Tensor, forbidden: Tensor) -> tuple[Tensor, Tensor]:
        logits: Tensor = head(hidden)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if self.settings.softcap is not None:
            logits = torch.tanh(logits / self.settings.softcap) * self.settings.softcap
        logits = (logits / self.settings.temperature).masked_fill_(forbidden, EXCLUDED)
        everything = logits.log_softmax(-1)
        rows = targets.clamp(max=len(forbidden) - 1)
        possible = (targets == rows) & ~forbidden[rows]
        chosen = everything.gather(-1, rows[:, None]).squeeze(-1).masked_fill(~possible, float("-inf"))
        return chosen, -(everything.exp() * everything).sum(-1)
