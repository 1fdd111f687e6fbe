"""Exact statistics of 8-bit images from histograms: counts of each of the 256 values per channel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from PIL import Image

from armature.components.robots.datasets.quantiles import Array, FeatureStatistics, between, ranks

CHANNELS = 3


@dataclass(frozen=True)
class Histogram:
    """Histogram of images. counts: pixels by channel and value, int64 (3, 256). images: number of images.

    Example:
        >>> Histogram.empty().add(Image.new("RGB", (2, 2), (255, 0, 0))).statistics().mean.ravel().tolist()
        [1.0, 0.0, 0.0]
    """

    counts: Array
    images: int

    @classmethod
    def empty(cls) -> Histogram:
        """Return a histogram without images: all counts are 0."""
        return cls(np.zeros((CHANNELS, 256), np.int64), 0)

    def add(self, image: Image.Image) -> Histogram:
        """Return the histogram with one more RGB image."""
        counts = np.array(image.convert("RGB").histogram(), np.int64).reshape(CHANNELS, 256)
        return Histogram(self.counts + counts, self.images + 1)

    def statistics(self) -> FeatureStatistics:
        """Return statistics of values in [0, 1], of shape (3, 1, 1) each.

        `count` is the number of images, as in LeRobot. Moments are computed from exact integers.
        """
        each = [_channel(counts) for counts in self.counts]
        low, high, mean, std, *quantiles = (np.array(column) for column in zip(*each, strict=True))
        return FeatureStatistics(low, high, mean, std, self.images, np.stack(quantiles)).reshape((CHANNELS, 1, 1))


def merge(shards: Sequence[Histogram]) -> Histogram:
    """Return the histogram of all images of all shards."""
    return Histogram(np.sum([shard.counts for shard in shards], axis=0), sum(shard.images for shard in shards))


def _channel(counts: Array) -> list[float]:
    """Return minimum, maximum, mean, standard deviation and quantiles of one channel, from its 256 counts."""
    present = np.flatnonzero(counts)
    seen = [(int(value), int(counts[value])) for value in present]
    pixels = sum(count for _, count in seen)
    total = sum(value * count for value, count in seen)
    squares = sum(value * value * count for value, count in seen)
    variance = (pixels * squares - total * total) / pixels**2  # Python integers: exact until this division
    below, above, weight = ranks(pixels)
    cumulated = np.cumsum(counts)
    low, high = (np.searchsorted(cumulated, each, side="right") / 255 for each in (below, above))
    quantiles = between(low, high, weight)
    return [present[0] / 255, present[-1] / 255, total / pixels / 255, variance**0.5 / 255, *quantiles]
