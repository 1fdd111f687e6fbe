"""Log-probs from the logits of all trained tokens: any kind of head, and the plainest form to compare with."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from armature.components.vlm.heads import EXCLUDED, HeadSettings


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
