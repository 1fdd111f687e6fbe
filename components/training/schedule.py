"""Learning rates as functions of the step, so that there is no scheduler state to lose."""

from __future__ import annotations

from math import cos, pi
from typing import Literal

Scheduler = Literal["constant", "linear", "cosine"]


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
