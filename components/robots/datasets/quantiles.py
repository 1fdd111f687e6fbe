"""Exact statistics of numbers: order statistics of all values, moments in float64, shards that merge."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from armature.components.contracts.errors import DataError

# What is known of one feature: the numbers that LeRobot's stats.json holds, and the order statistics behind them.

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


@dataclass(frozen=True)
class FeatureValues:
    """All values of a feature in some frames, and their moments.

    `parts` are (width, frames) each, in the type that they came in: a float32 takes 4 bytes, whatever its statistics
    are computed in. `mean` and `squares` (the sum of squared distances from the mean) are float64 (width,).
    """

    parts: tuple[Array, ...]
    count: int
    mean: Array
    squares: Array

    def statistics(self, threads: int = 1) -> FeatureStatistics:
        """Of all values, each array (width,)."""
        with ThreadPoolExecutor(threads) as executor:
            columns = executor.map(self._ordered, range(len(self.mean)))
            ordered = np.stack(list(columns), axis=1)
        std = np.sqrt(self.squares / self.count)
        return FeatureStatistics(ordered[0], ordered[1], self.mean, std, self.count, ordered[2:])

    def _ordered(self, row: int) -> Array:
        return _order(np.concatenate([part[row] for part in self.parts]))


def merge(shards: Sequence[FeatureValues]) -> FeatureValues:
    """All frames of all shards; their order does not matter.

    Moments by Chan, Golub and LeVeque (1979): no sum of squares is ever subtracted from another.
    """
    means, squares = (np.stack([getattr(shard, name) for shard in shards]) for name in ("mean", "squares"))
    count, mean, total = _merged(np.array([shard.count for shard in shards]), means, squares)
    return FeatureValues(tuple(part for shard in shards for part in shard.parts), count, mean, total)


def _merged(counts: Array, means: Array, squares: Array) -> tuple[int, Array, Array]:
    """Count, mean and squares of all; means and squares are (shards, width)."""
    weights = counts.astype(np.float64)[:, None]
    base = means[0]
    mean = base + ((means - base) * weights).sum(0) / weights.sum()
    return int(counts.sum()), mean, squares.sum(0) + ((means - mean) ** 2 * weights).sum(0)


def measure(
    rows: Array, lengths: Sequence[int], feature: str, first_episode: int = 0
) -> tuple[list[FeatureStatistics], FeatureValues]:
    """Statistics of each episode, and what all of them merge from: see `measure_columns`."""
    found, values = measure_columns(rows, lengths, feature, first_episode)
    low, high, mean, std, *quantiles, counts = found.values()
    levels = np.stack(quantiles, axis=1)
    episodes = [
        FeatureStatistics(low[i], high[i], mean[i], std[i], int(counts[i, 0]), levels[i]) for i in range(len(counts))
    ]
    return episodes, values


def measure_columns(
    rows: Array, lengths: Sequence[int] | Array, feature: str, first_episode: int = 0
) -> tuple[dict[str, Array], FeatureValues]:
    """Statistics of each episode by their names in stats.json, (episodes, width) each, and what all merge from.

    Args:
        rows: (frames, width), the episodes' frames one after another.
        lengths: Frames of each episode.
        feature: Named in errors, as is the episode, counted from `first_episode`.

    Raises:
        DataError: no frames, frames that do not add up, values that are not finite or not numeric.
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
    found = {"min": ends[0].T, "max": ends[1].T, "mean": moments[0], "std": std.T}
    found |= dict(zip(QUANTILES, quantiles.transpose(1, 2, 0), strict=True)) | {"count": counts[:, None]}
    return found, FeatureValues((columns,), *_merged(counts, *moments))


def _moments(columns: Array, starts: Array, counts: Array) -> tuple[Array, Array]:
    """Mean and sum of squared distances, each (width, episodes), in two passes: the second mends the first."""
    values = columns.astype(np.float64)
    mean = np.add.reduceat(values, starts, axis=1) / counts
    distances = values - np.repeat(mean, counts, axis=1)
    rest = np.add.reduceat(distances, starts, axis=1)
    squares = np.add.reduceat(distances * distances, starts, axis=1) - rest * rest / counts
    return mean + rest / counts, np.maximum(squares, 0.0)


def _order(values: Array) -> Array:
    """Minimum, maximum and the quantiles of one column, float64."""
    values.sort()
    below, above, weight = ranks(len(values))
    low, high = values[below].astype(np.float64), values[above].astype(np.float64)
    return np.concatenate([[values[0], values[-1]], between(low, high, weight)]).astype(np.float64)


def _check(rows: Array, lengths: Sequence[int] | Array, feature: str, first_episode: int) -> None:
    if rows.ndim != 2 or rows.dtype.kind not in "fiub":
        raise DataError(
            f"{rows.dtype} of shape {rows.shape} are not rows of numbers",
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
    if rows.dtype.kind == "f" and not (finite := np.isfinite(rows)).all():
        row, column = np.argwhere(~finite)[0]
        episode = int(np.searchsorted(np.cumsum(lengths), row, side="right"))
        raise DataError(
            f"value {column} of feature {feature!r} is {rows[row, column]}",
            code="feature_not_finite",
            where=f"episode {first_episode + episode}, frame {row - sum(lengths[:episode])}",
            remedy="fix or remove the episode; statistics of such values would make every normalized value NaN",
        )
