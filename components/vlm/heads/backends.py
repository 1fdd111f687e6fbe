"""The interface of head backends, their registry (setting `trainer.logprobs`), and the plain one, "normal"."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from armature.components.machine.registry import Registry

EXCLUDED = -1e30
"""Logit of a forbidden token. Its exp is 0, and 0 times this logit is 0, whereas 0 times -inf would be NaN."""


@dataclass(frozen=True)
class HeadSettings:
    """Settings of the logits z before the softmax.

    z = cap tanh((h W^T + b) / cap) / temperature, or z = (h W^T + b) / temperature without a softcap.
    """

    temperature: float
    softcap: float | None
    chunk_tokens: int
    """Number of tokens whose logits are in memory at once."""


class Backend(Protocol):
    """Computes log-probs and entropies from hidden states with an output head.

    Args:
        head: the kind of head that the backend will be called with.

    Raises:
        ConfigurationError: the backend does not support these settings, this head or this device.

    Example:
        >>> head = nn.Linear(2, 3, bias=False)
        >>> settings = HeadSettings(temperature=1.0, softcap=None, chunk_tokens=8)
        >>> backend = HEADS["normal"](settings, head, torch.device("cpu"))
        >>> logprobs, entropies = backend(head, torch.zeros(1, 2), torch.tensor([0]), torch.zeros(3, dtype=torch.bool))
        >>> round(logprobs.exp().item(), 4), round(entropies.exp().item(), 4)  # all three tokens are equally likely
        (0.3333, 3.0)
    """

    def __init__(self, settings: HeadSettings, head: nn.Module, device: torch.device) -> None: ...

    def __call__(self, head: nn.Module, hidden: Tensor, targets: Tensor, forbidden: Tensor) -> tuple[Tensor, Tensor]:
        """Return log-probs of `targets` and entropies, (N,) each, in fp32 or better, with gradients.

        Args:
            hidden: hidden states (N, D). With N = 0 the head must still get a gradient, of zeros.
            targets: token ids (N,). A target that is forbidden or beyond the head's rows gets -inf and no gradient.
            forbidden: mask (V,), bool, of tokens with probability 0.
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


class StandardHead:
    """Backend "normal": calls the head as the model does, and is the reference for the others.

    It supports any kind of head. Several tensors (N, V) live until the backward pass.
    """

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
