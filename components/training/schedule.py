"""Optimizer settings, and learning rates as functions of the step. Torch-free.

A learning rate is computed from the number of the step, so a resumed run has no scheduler state to restore.
"""

from __future__ import annotations

from math import cos, pi
from typing import Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from armature.components.contracts.settings import Settings

Scheduler = Literal["constant", "linear", "cosine"]


class OptimizerSettings(Settings):
    """Settings of AdamW, of checkpoints and of the seed, shared by all kinds of models."""

    adam_beta1: float = Field(0.9, ge=0, lt=1)
    """Decay of AdamW's first moment."""
    adam_beta2: float = Field(0.999, ge=0, lt=1)
    """Decay of AdamW's second moment."""
    adam_epsilon: PositiveFloat = 1e-8
    """AdamW's epsilon."""
    weight_decay: NonNegativeFloat = 0.0
    """AdamW's decoupled weight decay."""
    max_grad_norm: PositiveFloat = 1.0
    """Gradients are clipped to this norm: over all parameters, for a robot policy over each parameter group."""
    warmup_steps: NonNegativeInt = 0
    """Number of steps over which learning rates rise linearly from 0."""
    torch_compile: bool = False
    """Compile the model's layers with torch.compile, which fuses small operations into few kernels. It takes a minute
    or two at the start of a run and changes results in their last bits."""
    save_every: PositiveInt = 10
    """Number of steps between checkpoints from which a run can resume."""
    keep_checkpoints: PositiveInt = 2
    """Number of newest checkpoints to keep; older ones are deleted."""
    seed: NonNegativeInt = Field(0, lt=2**63)
    """Seed of the trainer's random number generators."""


def learning_rate(step: float, *, peak: float, warmup: int, steps: int, scheduler: Scheduler) -> float:
    """Return the learning rate of step 1, 2, ...

    It rises linearly to `peak` over `warmup` steps. Then it stays there (constant), or falls along a line or a cosine
    and would reach 0 at step `steps` + 1.

    Example:
        >>> [learning_rate(step, peak=1.0, warmup=2, steps=6, scheduler="linear") for step in range(1, 7)]
        [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]
    """
    if step <= warmup:
        return peak * step / warmup
    decay_steps = steps - warmup
    done = min((step - warmup - 1) / decay_steps, 1.0) if decay_steps else 0.0
    factor = {"constant": 1.0, "linear": 1 - done, "cosine": (1 + cos(pi * done)) / 2}[scheduler]
    return peak * factor


def warmup_cosine(step: float, *, warmup: int, decay: int, final: float) -> float:
    """Return the factor on peak learning rates in step k = 1, 2, ...

    The factor is k / warmup while k < warmup, then
    final + (1 - final) / 2 * (1 + cos(pi * (k - warmup) / (decay - warmup))), and `final` from step `decay` on.
    """
    if step < warmup:
        return step / warmup
    if step >= decay:
        return final
    return final + (1 - final) * (1 + cos(pi * (step - warmup) / (decay - warmup))) / 2
