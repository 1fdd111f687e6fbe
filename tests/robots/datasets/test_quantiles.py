"""Statistics compared with numpy on the whole data, bit for bit where they are exact."""

from __future__ import annotations

from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from PIL import Image

from armature.components.robots.datasets import histograms
from armature.components.robots.datasets.histograms import Histogram
from armature.components.robots.datasets.quantiles import LEVELS, measure, merge
from tests.refusals import refused

FINITE = st.floats(-(2.0**50), 2.0**50, width=32) | st.sampled_from([0.0, -1.0, 1.0])
ROWS = hnp.arrays(np.float32, st.tuples(st.integers(1, 60), st.integers(1, 3)), elements=FINITE)


def split(rows, cuts):
    """Return the lengths of the episodes that start at `cuts`."""
    edges = sorted({0, len(rows), *(cut % len(rows) for cut in cuts)})
    return [b - a for a, b in pairwise(edges)]


def assert_exact(statistics, rows):
    whole = rows.astype(np.float64)
    np.testing.assert_array_equal(statistics.quantiles, np.quantile(whole, LEVELS, axis=0))
    np.testing.assert_array_equal(statistics.min, whole.min(0))
    np.testing.assert_array_equal(statistics.max, whole.max(0))
    assert statistics.count == len(rows)
    for column in range(rows.shape[1]):
        values = [Fraction(float(value)) for value in rows[:, column]]
        mean = sum(values) / len(values)
        variance = sum((value - mean) ** 2 for value in values) / len(values)
        scale = max(abs(float(value)) for value in values)
        assert abs(statistics.mean[column] - float(mean)) <= 1e-14 * scale
        assert abs(statistics.std[column] - float(variance) ** 0.5) <= 1e-13 * float(variance) ** 0.5 + 1e-15 * scale


@settings(max_examples=60)
@given(ROWS, st.lists(st.integers(0, 1000), max_size=6))
def test_quantiles_are_bit_identical_to_numpy(rows, cuts):
    lengths = split(rows, cuts)
    episodes, values = measure(rows, lengths, "state")
    assert_exact(values.statistics(), rows)
    for part, statistics in zip(np.split(rows, np.cumsum(lengths)[:-1]), episodes, strict=True):
        assert_exact(statistics, part)


@settings(max_examples=40)
@given(ROWS, st.lists(st.integers(0, 1000), max_size=6), st.randoms())
def test_merged_shards_equal_the_whole_in_any_order(rows, cuts, random):
    lengths = split(rows, cuts)
    shards = [measure(part, [len(part)], "state")[1] for part in np.split(rows, np.cumsum(lengths)[:-1])]
    random.shuffle(shards)
    assert_exact(merge(shards).statistics(threads=2), rows)
    half = len(shards) // 2
    if half:
        assert_exact(merge([merge(shards[half:]), merge(shards[:half])]).statistics(), rows)


def test_outlier_changes_only_extremes():
    rows = np.random.default_rng(0).normal(size=(20_000, 8)).astype(np.float32)
    before = measure(rows, [len(rows)], "action")[1].statistics()
    spoiled = rows.copy()
    spoiled[np.argmax(rows[:, 3]), 3] = 1e4
    after = measure(spoiled, [len(rows)], "action")[1].statistics()
    np.testing.assert_array_equal(after.quantiles, before.quantiles)
    np.testing.assert_array_equal(after.min, before.min)
    assert after.max[3] == 1e4 and np.array_equal(np.delete(after.max, 3), np.delete(before.max, 3))


def test_std_is_accurate_for_small_spread_far_from_zero():
    """With float32 sums of squares the result would be 0 or 0.03 instead of 0.01."""
    rng = np.random.default_rng(0)
    rows = (100 + 0.01 * rng.normal(size=(50_000, 1))).astype(np.float32)
    shards = [measure(part, [len(part)], "state")[1] for part in np.array_split(rows, 7)]
    true = np.std(rows.astype(np.longdouble) - 100, axis=0)
    assert merge(shards).statistics().std == pytest.approx(true.astype(float), rel=1e-9)


@pytest.mark.parametrize("value", [0.1, -1.0, 0.0, 7.25])
def test_constant_has_zero_std(value):
    rows = np.full((37, 1), value, np.float32)
    statistics = merge([measure(rows[:5], [5], "a")[1], measure(rows[5:], [32], "a")[1]]).statistics()
    assert statistics.std == 0.0
    assert {*statistics.quantiles[:, 0], statistics.min[0], statistics.max[0]} == {float(rows[0, 0])}


def test_statistics_of_integers_and_booleans():
    rows = np.arange(2**40, 2**40 + 9)[:, None]
    np.testing.assert_array_equal(measure(rows, [9], "index")[1].statistics().quantiles[2], [2**40 + 4])
    assert measure(np.array([[True], [False]]), [2], "done")[1].statistics().mean == 0.5


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 1e200])  # the square of the last is infinite
def test_non_finite_value_error_names_episode_and_frame(bad):
    rows = np.zeros((10, 2))
    rows[7, 1] = bad
    with refused("feature_not_finite", "state", 1) as caught:
        measure(rows, [4, 6], "state", first_episode=20)
    assert caught.value.where == "episode 21, frame 3"


@pytest.mark.parametrize(
    ("rows", "lengths", "code", "values"),
    [
        (np.zeros((3, 1)), [3, 0], "episode_empty", ["episode 1"]),
        (np.zeros((3, 1)), [], "frame_count_mismatch", [3, 0]),
        (np.zeros((3, 1)), [2], "frame_count_mismatch", [3, 2]),
        (np.zeros((3, 1, 2)), [3], "rows_not_numeric", ["state"]),
        (np.array([["a"]]), [1], "rows_not_numeric", ["state"]),
    ],
)
def test_rejects_invalid_rows(rows, lengths, code, values):
    with refused(code, *values):
        measure(rows, lengths, "state")


PIXELS = hnp.arrays(np.uint8, st.tuples(st.integers(1, 5), st.just(4), st.just(6), st.just(3)))


@settings(max_examples=40)
@given(PIXELS, st.integers(0, 5))
def test_image_statistics_equal_numpy_over_all_pixels(images, cut):
    def counted(some):
        histogram = Histogram.empty()
        for image in some:
            histogram = histogram.add(Image.fromarray(image))
        return histogram

    statistics = histograms.merge([counted(images[:cut]), counted(images[cut:])]).statistics()
    pixels = images.reshape(-1, 3).astype(np.float64) / 255
    np.testing.assert_array_equal(statistics.quantiles[..., 0, 0], np.quantile(pixels, LEVELS, axis=0))
    np.testing.assert_array_equal(statistics.min[:, 0, 0], pixels.min(0))
    np.testing.assert_array_equal(statistics.max[:, 0, 0], pixels.max(0))
    np.testing.assert_allclose(statistics.mean[:, 0, 0], pixels.mean(0), rtol=1e-13)
    # numpy of a constant: 1e-15
    np.testing.assert_allclose(statistics.std[:, 0, 0], pixels.std(0), rtol=1e-12, atol=1e-13)
    assert statistics.count == len(images) and statistics.mean.shape == (3, 1, 1)
