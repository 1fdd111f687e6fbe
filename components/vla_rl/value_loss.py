"""What the value head is trained on."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import huber_loss

from armature.components.vla_rl.settings import GAE


def value_loss(values: Tensor, before: Tensor, targets: Tensor, settings: GAE) -> tuple[Tensor, Tensor]:
    """max(huber(V - R), huber(V_clip - R)) with V_clip = V_old + clip(V - V_old, -value_clip, value_clip), and (bool)
    where the second is larger: (E,) each.

    huber(e) is e² / 2 where |e| <= d = huber_delta, else d (|e| - d / 2). With `value_clip` 0 it is the first alone.
    Source of the clip: the PPO of OpenAI's baselines.

    Args:
        values: (E,), V, with its gradient. before: (E,), V_old, of the rollout. targets: (E,), R.
    """

    def huber(predicted: Tensor) -> Tensor:
        return huber_loss(predicted, targets, reduction="none", delta=settings.huber_delta)

    plain = huber(values)
    if not settings.value_clip:
        return plain, torch.zeros_like(plain, dtype=torch.bool)
    clipped = huber(values.clamp(before - settings.value_clip, before + settings.value_clip))
    return torch.maximum(plain, clipped), clipped > plain
