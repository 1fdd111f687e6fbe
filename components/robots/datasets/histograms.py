"""Exact statistics of 8-bit images: how often each of 256 values occurs in each channel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from PIL import Image

from armature.components.robots.datasets.quantiles import Array, FeatureStatistics, between, ranks

CHANNELS = 3


@dataclass(frozen=True)
class Histogram:
    """`counts` is int64 (3, 256), pixels by channel and value; `images` is how many were counted."""

    counts: Array
    images: int

    @classmethod
    def empty(cls) -> Histogram:
        return cls(np.zeros((CHANNELS, 256), np.int64), 0)

    def add(self, image: Image.Image) -> Histogram:
        """With one RGB image more."""
        counts = np.array(image.convert("RGB").histogram(), np.int64).reshape(CHANNELS, 256)
        return Histogram(self.counts + counts, self.images + 1)

    def statistics(self) -> FeatureStatistics:
        """Of values in [0, 1], (3, 1, 1) each; `count` is images, as LeRobot counts. Moments are exact integers."""
        each = [_channel(counts) for counts in self.counts]
        low, high, mean, std, *quantiles = (np.array(column) for column in zip(*each, strict=True))
        return FeatureStatistics(low, high, mean, std, self.images, np.stack(quantiles)).reshape((CHANNELS, 1, 1))


def merge(shards: Sequence[Histogram]) -> Histogram:
    """All images of all shards."""
    return Histogram(np.sum([shard.counts for shard in shards], axis=0), sum(shard.images for shard in shards))


def _channel(counts: Array) -> list[float]:
    """Minimum, maximum, mean, std and the quantiles of one channel."""
    present = np.flatnonzero(counts)
    seen = [(int(value), int(counts[value])) for value in present]
    pixels = sum(count for _, count in seen)
    total = sum(value * count for value, count in seen)
    squares = sum(value * value * count for value, count in seen)
    variance = (pixels * squares - total * total) / pixels**2  # of Python's integers: nothing is rounded before /
    below, above, weight = ranks(pixels)
    cumulated = np.cumsum(counts)
    low, high = (np.searchsorted(cumulated, each, side="right") / 255 for each in (below, above))
    quantiles = between(low, high, weight)
    return [present[0] / 255, present[-1] / 255, total / pixels / 255, variance**0.5 / 255, *quantiles]
