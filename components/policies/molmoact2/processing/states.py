"""A robot's state as tokens."""

from __future__ import annotations

import numpy as np

from components.policies.molmoact2.processing.batch import Floats, Ints


def state_bins(state: Floats, count: int) -> Ints:
    """For each normalized value the nearest of `count` points spread evenly over [-1, 1]; halves go to the even one.

    NaN is 0, values outside are clipped. Computed in float32.
    """
    values = np.nan_to_num(np.asarray(state, np.float32), nan=0.0, posinf=1.0, neginf=-1.0)
    return np.rint((np.clip(values, -1, 1) + 1) / 2 * (count - 1)).astype(np.int64)
