"""The learning rate as a function of the update, so that there is no scheduler state to lose."""

from __future__ import annotations

from math import cos, pi

from components.vla.settings import VLATrainerSettings


def lr_factor(update: int, settings: VLATrainerSettings) -> float:
    """What all peak learning rates are multiplied by in update 1, 2, ...

    k / warmup while k < warmup, then alpha + (1 - alpha) / 2 * (1 + cos(pi * (k - warmup) / (decay - warmup))), and
    alpha from `decay` on, alpha being `final_lr_fraction`.
    """
    warmup, decay = settings.warmup_steps, settings.decay_steps or settings.max_steps
    if update < warmup:
        return update / warmup
    if update >= decay:
        return settings.final_lr_fraction
    falling = (1 + cos(pi * (update - warmup) / (decay - warmup))) / 2
    return settings.final_lr_fraction + (1 - settings.final_lr_fraction) * falling
