"""Confidence intervals, compared with published tables and with SciPy."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from armature.components.evaluation.wilson import (
    clustered_wilson_interval,
    compare_proportions,
    mean_interval,
    normal_quantile,
    wilson_interval,
)

counts = st.integers(1, 5000).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n)))


@pytest.mark.parametrize(
    ("successes", "trials", "low", "high"),
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718)],
)
def test_wilson_interval_equals_newcombe_s_table(successes, trials, low, high):
    # Newcombe (1998), "Two-sided confidence intervals for the single proportion", table I, method 3.
    interval = wilson_interval(successes, trials)
    assert (round(interval.low, 4), round(interval.high, 4)) == (low, high)


@given(counts, st.sampled_from([0.8, 0.9, 0.95, 0.99]))
def test_wilson_interval_equals_scipy(count, confidence):
    ours = wilson_interval(*count, confidence)
    theirs = stats.binomtest(*count).proportion_ci(confidence, method="wilson")
    assert ours.low == pytest.approx(theirs.low, abs=1e-9)
    assert ours.high == pytest.approx(theirs.high, abs=1e-9)
    assert 0 <= ours.low <= ours.estimate <= ours.high <= 1


def test_wilson_interval_of_no_trials_and_of_invalid_counts():
    assert wilson_interval(0, 0).low == 0.0 and wilson_interval(0, 0).high == 1.0
    for bad in [(-1, 3), (4, 3), (0, -1)]:
        with pytest.raises(ValueError):
            wilson_interval(*bad)
    with pytest.raises(ValueError):
        wilson_interval(1, 2, confidence=1.0)


def test_compare_proportions_equals_newcombe_s_table():
    # Newcombe (1998), "Interval estimation for the difference", table II: 56/70 - 48/80, method 10.
    comparison = compare_proportions((48, 80), (56, 70))
    assert comparison.difference == pytest.approx(0.2)
    assert (round(comparison.low, 4), round(comparison.high, 4)) == (0.0524, 0.3339)


@given(st.integers(1, 10**6), st.integers(1, 10**6), st.data())
def test_p_values_equal_scipy_s_chi2_test(n, m, data):
    first, second = (data.draw(st.integers(0, n)), n), (data.draw(st.integers(0, m)), m)
    table = [[k, trials - k] for k, trials in (first, second)]
    if all(map(sum, zip(*table, strict=True))):
        expected = stats.chi2_contingency(table, correction=False).pvalue
        assert compare_proportions(first, second).p_value == pytest.approx(expected, rel=1e-6, abs=1e-300)


@pytest.mark.parametrize("confidence", [1e-9, 0.5, 0.95, 1 - 1e-12, 1 - 2**-53])
def test_normal_quantile_equals_scipy(confidence):
    assert normal_quantile(confidence) == pytest.approx(stats.norm.isf((1 - confidence) / 2), rel=1e-6)


def test_compare_proportions_of_equal_and_of_empty_samples():
    assert compare_proportions((10, 10), (20, 20)).p_value == 1.0
    with pytest.raises(ValueError):
        compare_proportions((0, 0), (1, 2))


@given(counts, counts)
def test_comparison_is_antisymmetric(first, second):
    forth, back = compare_proportions(first, second), compare_proportions(second, first)
    assert forth.low == pytest.approx(-back.high, abs=1e-12)
    assert -1 - 1e-9 <= forth.low <= forth.difference <= forth.high <= 1 + 1e-9


def test_identical_samples_of_a_task_do_not_narrow_the_interval():
    once = wilson_interval(7, 10)
    assert clustered_wilson_interval([[True]] * 7 + [[False]] * 3) == once
    copied = clustered_wilson_interval([[True] * 8] * 7 + [[False] * 8] * 3)
    assert copied.estimate == once.estimate
    assert copied.high - copied.low >= (once.high - once.low) * 0.95
    assert clustered_wilson_interval([[True] * 8] * 10).n == 10
    assert clustered_wilson_interval([[True, False]] * 20).n == 40  # independent samples count fully


@given(st.lists(st.lists(st.booleans(), min_size=1, max_size=5), min_size=1, max_size=30))
def test_clustered_samples_count_at_most_as_independent_trials(outcomes):
    n = sum(map(len, outcomes))
    interval = clustered_wilson_interval(outcomes)
    assert 0 <= interval.low <= interval.estimate <= interval.high <= 1
    assert interval.n <= n


def test_mean_interval_equals_scipy_s_standard_error():
    values = [0.0, 0.5, 1.0, 1.0, 0.25]
    interval = mean_interval([[v] for v in values])
    half = 1.959963984540054 * stats.sem(values)
    assert interval.low == pytest.approx(0.55 - half) and interval.high == pytest.approx(0.55 + half)
    assert math.isnan(mean_interval([[1.0, 0.0]]).low)
    assert str(mean_interval([[0.0]] * 8)) == "0.000"  # equal values give no estimate of the error
    assert math.isnan(mean_interval([]).estimate)


@given(st.floats(-10, 10), st.lists(st.integers(1, 9), min_size=1, max_size=9))
def test_mean_interval_of_equal_values_has_no_limits(value, sizes):
    assert math.isnan(mean_interval([[value] * size for size in sizes]).low)
