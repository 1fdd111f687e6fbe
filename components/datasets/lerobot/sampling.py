"""Which frames of an episode stand for all of them where images are counted."""

from __future__ import annotations

import numpy as np


def sampled(length: int) -> list[int]:
    """LeRobot's choice: `length` ** 0.75 frames, at least 100 and at most 10,000, evenly spaced; all of fewer."""
    count = min(length, max(100, min(int(length**0.75), 10_000)))
    return [int(place) for place in np.round(np.linspace(0, length - 1, count))]
