"""Exact statistics of numbers: quantiles of all values, moments in float64, and merging of shards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from armature.components.contracts.errors import DataError

# --- Statistics of one feature, as in LeRobot's stats.json, and the values they are computed from ---

QUANTILES = {"q01": 0.01, "q10": 0.10, "q50": 0.50, "q90": 0.90, "q99": 0.99}
LEVELS = np.array(list(QUANTILES.values()))

LARGEST = np.float64(1e150)  # as float64, because numpy would cast a Python float to float32
"""Values are smaller, so that their squares are finite."""

Array = NDArray[Any]


@dataclass(frozen=True)
class FeatureStatistics:
    """Statistics of one feature over `count` frames. Arrays are float64 of the feature's shape, (3, 1, 1) for images.

    `quantiles` has an additional first dimension, in the order of `QUANTILES`. `std` is the population standard
    deviation: it divides by the count.
    """

    min: Array
    max: Array
    mean: Array
    std: Array
    count: int
    quantiles: Array

    def arrays(self) -> dict[str, Array]:
        """Return the statistics by their names in stats.json."""
        entry = {"min": self.min, "max": self.max, "mean": self.mean, "std": self.std}
        return entry | dict(zip(QUANTILES, self.quantiles, strict=True)) | {"count": np.array([self.count])}

    def document(self) -> dict[str, list[Any]]:
        """Return the feature's entry in stats.json."""
        return {name: value.tolist() for name, value in self.arrays().items()}

    def reshape(self, shape: tuple[int, ...]) -> FeatureStatistics:
        """Return the same statistics for frames of another shape."""
        return FeatureStatistics(
            self.min.reshape(shape),
            self.max.reshape(shape),
            self.mean.reshape(shape),
            self.std.reshape(shape),
            self.count,
            self.quantiles.reshape(len(QUANTILES), *shape),
        )


def ranks(count: int | Array) -> tuple[Array, Array, Array]:
    """Return the indices between which each quantile of `count` sorted values is interpolated.

    The result has three arrays: the lower indices, the upper indices, and the weights of the upper values. Their first
    axis has one entry per quantile in `LEVELS`; the other axes are the axes of `count`. This is definition 7 of Hyndman
    and Fan (1996), numpy's method "linear".
    """
    counts = np.asarray(count)
    place = (counts - 1) * LEVELS.reshape(-1, *(1,) * counts.ndim)
    below = np.floor(place)
    return below.astype(np.int64), np.minimum(below + 1, counts - 1).astype(np.int64), place - below


def between(low: Array, high: Array, weight: Array) -> Array:
    """Return the interpolation `low` + `weight` (`high` - `low`).

    It is computed from the nearer end, so that it increases with `weight` and is rounded as in numpy.
    """
    step = high - low
    return np.where(weight >= 0.5, high - step * (1 - weight), low + step * weight)


def document(statistics: Mapping[str, FeatureStatistics]) -> dict[str, dict[str, list[Any]]]:
    """Return the content of stats.json for several features."""
    return {name: each.document() for name, each in statistics.items()}


@dataclass(frozen=True)
class FeatureValues:
    """All values of a feature in some frames, and their moments.

    parts: arrays (width, frames) in their original type, so that a float32 takes 4 bytes although statistics are
        computed in float64.
    mean: float64 (width,). squares: sum of the squared distances of all values from the mean, float64 (width,).
    """

    parts: tuple[Array, ...]
    count: int
    mean: Array
    squares: Array

    def statistics(self, threads: int = 1) -> FeatureStatistics:
        """Return the statistics of all values, with arrays of shape (width,)."""
        with ThreadPoolExecutor(threads) as executor:
            columns = executor.map(self._ordered, range(len(self.mean)))
            ordered = np.stack(list(columns), axis=1)
        std = np.sqrt(self.squares / self.count)
        return FeatureStatistics(ordered[0], ordered[1], self.mean, std, self.count, ordered[2:])

    def _ordered(self, row: int) -> Array:
        return _order(np.concatenate([part[row] for part in self.parts]))


def merge(shards: Sequence[FeatureValues]) -> FeatureValues:
    """Merge the values of all shards; their order does not matter.

    Moments are merged as in Chan, Golub and LeVeque (1979), which never subtracts two sums of squares.
    """
    means, squares = (np.stack([getattr(shard, name) for shard in shards]) for name in ("mean", "squares"))
    count, mean, total = _merged(np.array([shard.count for shard in shards]), means, squares)
    return FeatureValues(tuple(part for shard in shards for part in shard.parts), count, mean, total)


def _merged(counts: Array, means: Array, squares: Array) -> tuple[int, Array, Array]:
    """Merge the moments of shards: `counts` (shards,), `means` and `squares` (shards, width).

    Returns:
        Number of frames in all shards; mean (width,) and sum of squared distances from it (width,).
    """
    weights = counts.astype(np.float64)[:, None]
    base = means[0]
    mean = base + ((means - base) * weights).sum(0) / weights.sum()
    return int(counts.sum()), mean, squares.sum(0) + ((means - mean) ** 2 * weights).sum(0)


def measure(
    rows: Array, lengths: Sequence[int], feature: str, first_episode: int = 0
) -> tuple[list[FeatureStatistics], FeatureValues]:
    """Return the statistics of each episode, and the values of all episodes, to be merged with other values.

    Arguments and errors are described at `measure_columns`.

    Example:
        >>> (episode,), _ = measure(np.array([[1.0], [3.0]]), lengths=[2], feature="action")
        >>> episode.mean.tolist(), episode.std.tolist()
        ([2.0], [1.0])
    """
    statistics, values = measure_columns(rows, lengths, feature, first_episode)
    low, high, mean, std, *quantiles, counts = statistics.values()
    levels = np.stack(quantiles, axis=1)
    episodes = [
        FeatureStatistics(low[i], high[i], mean[i], std[i], int(counts[i, 0]), levels[i]) for i in range(len(counts))
    ]
    return episodes, values


def measure_columns(
    rows: Array, lengths: Sequence[int] | Array, feature: str, first_episode: int = 0
) -> tuple[dict[str, Array], FeatureValues]:
    """Measure episodes. Return their statistics, and the values of all episodes, to be merged with other values.

    The statistics are arrays by the names that they have in stats.json: `count` is (episodes, 1), all others are
    (episodes, width).

    Args:
        rows: frames of the episodes one after another, (frames, width).
        lengths: number of frames of each episode.
        feature: name in error messages.
        first_episode: number of the first episode in error messages.

    Raises:
        DataError: there are no frames, their number does not match the lengths, or values are not finite or numeric.
    """
    _check(rows, lengths, feature, first_episode)
    columns = np.ascontiguousarray(rows.T if rows.dtype.kind == "f" else rows.T.astype(np.float64))
    counts = np.array(lengths)
    starts = np.concatenate([[0], np.cumsum(counts)[:-1]])
    mean, squares = _moments(columns, starts, counts)
    ordered = columns.copy()
    for start, count in zip(starts, counts, strict=True):
        ordered[:, start : start + count].sort(axis=1)
    below, above, weight = ranks(counts)
    low, high = (ordered[:, starts + each].astype(np.float64) for each in (below, above))  # (width, levels, episodes)
    quantiles = between(low, high, weight)
    ends = ordered[:, starts].astype(np.float64), ordered[:, starts + counts - 1].astype(np.float64)
    std = np.sqrt(squares / counts)
    moments = np.ascontiguousarray(mean.T), np.ascontiguousarray(squares.T)
    statistics = {"min": ends[0].T, "max": ends[1].T, "mean": moments[0], "std": std.T}
    statistics |= dict(zip(QUANTILES, quantiles.transpose(1, 2, 0), strict=True)) | {"count": counts[:, None]}
    return statistics, FeatureValues((columns,), *_merged(counts, *moments))


def _moments(columns: Array, starts: Array, counts: Array) -> tuple[Array, Array]:
    """Return, for each episode, the mean and the sum of squared distances from it, both (width, episodes).

    A second pass over the values corrects rounding errors.
    """
    values = columns.astype(np.float64)
    mean = np.add.reduceat(values, starts, axis=1) / counts
    distances = values - np.repeat(mean, counts, axis=1)
    rest = np.add.reduceat(distances, starts, axis=1)
    squares = np.add.reduceat(distances * distances, starts, axis=1) - rest * rest / counts
    return mean + rest / counts, np.maximum(squares, 0.0)


def _order(values: Array) -> Array:
    """Sort `values` in place. Return their minimum, maximum and quantiles in one array, float64 (2 + quantiles,)."""
    values.sort()
    below, above, weight = ranks(len(values))
    low, high = values[below].astype(np.float64), values[above].astype(np.float64)
    return np.concatenate([[values[0], values[-1]], between(low, high, weight)]).astype(np.float64)


def _check(rows: Array, lengths: Sequence[int] | Array, feature: str, first_episode: int) -> None:
    if rows.ndim != 2 or rows.dtype.kind not in "fiub":
        raise DataError(
            f"rows are {rows.dtype} of shape {rows.shape}, not rows of numbers",
            code="rows_not_numeric",
            where=f"feature {feature!r}",
        )
    for number, length in enumerate(lengths, first_episode):
        if length <= 0:
            raise DataError(
                "the episode is empty",
                code="episode_empty",
                where=f"episode {number}",
                remedy="remove it from the dataset",
            )
    if not len(lengths) or sum(lengths) != len(rows):
        raise DataError(
            f"{len(rows)} frames for episodes of {sum(lengths)}",
            code="frame_count_mismatch",
            where=f"feature {feature!r}",
        )
    if rows.dtype.kind == "f" and not (usable := np.isfinite(rows) & (np.abs(rows) < LARGEST)).all():
        row, column = np.argwhere(~usable)[0]
        episode = int(np.searchsorted(np.cumsum(lengths), row, side="right"))
        raise DataError(
            f"value {column} of feature {feature!r} is {rows[row, column]}, not a finite number below {LARGEST:g}",
            code="feature_not_finite",
            where=f"episode {first_episode + episode}, frame {row - sum(lengths[:episode])}",
            remedy="fix or remove the episode: with such statistics every normalized value would be NaN",
        )
