"""What is known of one feature: the numbers that LeRobot's stats.json holds, and the order statistics behind them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

QUANTILES = {"q01": 0.01, "q10": 0.10, "q50": 0.50, "q90": 0.90, "q99": 0.99}
LEVELS = np.array(list(QUANTILES.values()))

Array = NDArray[Any]


@dataclass(frozen=True)
class FeatureStatistics:
    """Of one feature over `count` frames. Arrays are float64 and of the feature's shape, (3, 1, 1) for images.

    `quantiles` has one more dimension in front, in the order of `QUANTILES`. `std` divides by the count.
    """

    min: Array
    max: Array
    mean: Array
    std: Array
    count: int
    quantiles: Array

    def arrays(self) -> dict[str, Array]:
        """By their names in stats.json."""
        entry = {"min": self.min, "max": self.max, "mean": self.mean, "std": self.std}
        return entry | dict(zip(QUANTILES, self.quantiles, strict=True)) | {"count": np.array([self.count])}

    def document(self) -> dict[str, list[Any]]:
        """The feature's entry of stats.json."""
        return {name: value.tolist() for name, value in self.arrays().items()}

    def reshape(self, shape: tuple[int, ...]) -> FeatureStatistics:
        """The same for a feature whose frames have `shape`."""
        return FeatureStatistics(
            self.min.reshape(shape),
            self.max.reshape(shape),
            self.mean.reshape(shape),
            self.std.reshape(shape),
            self.count,
            self.quantiles.reshape(len(QUANTILES), *shape),
        )


def ranks(count: int | Array) -> tuple[Array, Array, Array]:
    """Where the quantiles of `count` sorted values lie: two ranks and the weight of the second.

    Definition 7 of Hyndman and Fan (1996), numpy's "linear". A new first axis holds the levels.
    """
    counts = np.asarray(count)
    place = (counts - 1) * LEVELS.reshape(-1, *(1,) * counts.ndim)
    below = np.floor(place)
    return below.astype(np.int64), np.minimum(below + 1, counts - 1).astype(np.int64), place - below


def between(low: Array, high: Array, weight: Array) -> Array:
    """`low` + `weight` (`high` - `low`), from the nearer end, so that it is monotonic and rounds as numpy does."""
    step = high - low
    return np.where(weight >= 0.5, high - step * (1 - weight), low + step * weight)


def document(statistics: Mapping[str, FeatureStatistics]) -> dict[str, dict[str, list[Any]]]:
    """stats.json for several features."""
    return {name: each.document() for name, each in statistics.items()}
