"""The optimizer's settings, and learning rates as functions of the step: no scheduler state can be lost. Torch-free."""

from __future__ import annotations

from math import cos, pi
from typing import Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from armature.components.contracts.settings import Settings

Scheduler = Literal["constant", "linear", "cosine"]


class OptimizerSettings(Settings):
    """AdamW, its checkpoints and its seed: the same for every model."""

    adam_beta1: float = Field(0.9, ge=0, lt=1)
    """AdamW's decay of the first moment."""
    adam_beta2: float = Field(0.999, ge=0, lt=1)
    """AdamW's decay of the second moment."""
    adam_epsilon: PositiveFloat = 1e-8
    """AdamW's epsilon."""
    weight_decay: NonNegativeFloat = 0.0
    """AdamW's decoupled weight decay."""
    max_grad_norm: PositiveFloat = 1.0
    """Gradients are clipped to this norm; those of a robot policy for each parameter group."""
    warmup_steps: NonNegativeInt = 0
    """Steps over which learning rates rise linearly."""
    torch_compile: bool = False
    """Compile the model's layers: their small operations become few kernels. Takes a minute or two at the start of a
    run, and moves the last bits."""
    save_every: PositiveInt = 10
    """Steps between checkpoints to resume from."""
    keep_checkpoints: PositiveInt = 2
    """Newest checkpoints that are kept."""
    seed: NonNegativeInt = Field(0, lt=2**63)
    """Seed of the trainer's random numbers."""


def learning_rate(step: float, *, peak: float, warmup: int, steps: int, scheduler: Scheduler) -> float:
    """Of step 1, 2, ...: rises linearly to `peak` over the warm-up, then stays, or falls to 0 just after `steps`."""
    if step <= warmup:
        return peak * step / warmup
    decay_steps = steps - warmup
    done = min((step - warmup - 1) / decay_steps, 1.0) if decay_steps else 0.0
    factor = {"constant": 1.0, "linear": 1 - done, "cosine": (1 + cos(pi * done)) / 2}[scheduler]
    return peak * factor


def warmup_cosine(step: float, *, warmup: int, decay: int, final: float) -> float:
    """What peak learning rates are multiplied by in step k = 1, 2, ...

    k / warmup while k < warmup, then final + (1 - final) / 2 * (1 + cos(pi * (k - warmup) / (decay - warmup))), and
    `final` from `decay` on.
    """
    if step < warmup:
        return step / warmup
    if step >= decay:
        return final
    return final + (1 - final) * (1 + cos(pi * (step - warmup) / (decay - warmup))) / 2
