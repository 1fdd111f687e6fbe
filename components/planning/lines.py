"""What is fixed, and what grows with the size of a step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

APART = 1.5
"""The largest step over the smallest, from which on what is fixed is told apart from what grows with a step."""


def apart(sizes: Sequence[float]) -> bool:
    """Whether sizes say what is fixed and what grows."""
    return max(sizes) > APART * min(sizes)


def line(points: Sequence[tuple[float, float]], share: float) -> tuple[float, float]:
    """What is fixed, and what is added for each unit of size: least squares, neither below 0.

    Args:
        points: sizes and seconds.
        share: of the mean seconds that is fixed, if all sizes are about the same.
    """
    x, y = np.array(points).T
    mean_x, mean_y = float(x.mean()), float(y.mean())
    if not apart(x.tolist()):
        return share * mean_y, (1 - share) * mean_y / mean_x
    slope = float(((x - mean_x) * (y - mean_y)).sum() / ((x - mean_x) ** 2).sum())
    slope = min(max(slope, 0.0), mean_y / mean_x)
    return mean_y - slope * mean_x, slope
