"""What goes through a model at once."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from armature.components.policies.molmoact2.modeling.flow import FlowSamples
from armature.components.policies.molmoact2.processing.batch import PolicyBatch


@dataclass(frozen=True)
class PolicyMicroBatch:
    """A part of an update. `draws` is None where no flow is trained; `tokens` are without padding."""

    batch: PolicyBatch
    draws: FlowSamples | None
    tokens: int

    def to(self, device: torch.device) -> PolicyMicroBatch:
        draws = None if self.draws is None else self.draws.to(device)
        return replace(self, batch=self.batch.to(device), draws=draws)

    @property
    def padding(self) -> int:
        """Tokens of the batch that are of no example."""
        return self.batch.input_ids.numel() - self.tokens
