"""Orders of samples: shuffles are shuffles, and every source gets its share."""

from __future__ import annotations

from collections import Counter
from itertools import permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from armature.components.datasets.order import BLOCK, MixtureSchedule, mixed, permuted


@settings(max_examples=60)
@given(size=st.integers(1, 300), key=st.integers(0, 2**64 - 1))
def test_a_shuffle_has_everything_once(size, key):
    assert sorted(permuted(index, size, key) for index in range(size)) == list(range(size))


def test_every_thing_comes_to_every_place_as_often():
    size, keys = 7, 1400
    counts = np.zeros((size, size))
    for key in range(keys):
        for index in range(size):
            counts[index, permuted(index, size, mixed(key))] += 1
    expected = keys / size
    assert ((counts - expected) ** 2 / expected).sum() < 75  # 36 degrees of freedom: one in 10,000 seeds above 75


def test_all_orders_of_four_come_about():
    seen = Counter(tuple(permuted(index, 4, mixed(key)) for index in range(4)) for key in range(2000))
    assert set(seen) == set(permutations(range(4)))


def test_a_large_shuffle_has_no_trend():
    size = 1_000_003
    places = np.array([permuted(index, size, 5) for index in range(3000)]) / size
    assert abs(np.corrcoef(places[1:], places[:-1])[0, 1]) < 0.07
    assert np.histogram(places, 10, (0, 1))[0].min() > 220


@settings(max_examples=40)
@given(weights=st.lists(st.floats(0.01, 100), min_size=1, max_size=5), blocks=st.integers(1, 4), seed=st.integers(0, 9))
def test_every_source_gets_its_share_and_counts_without_gaps(weights, blocks, seed):
    schedule = MixtureSchedule(weights, seed)
    taken: list[list[int]] = [[] for _ in weights]
    for position in range(blocks * BLOCK):
        source, before = schedule.at(position)
        taken[source].append(before)
    for weight, numbers in zip(weights, taken, strict=True):
        assert sorted(numbers) == list(range(len(numbers)))
        assert abs(len(numbers) - blocks * BLOCK * weight / sum(weights)) <= len(weights)


@settings(max_examples=20)
@given(
    weights=st.lists(st.floats(0.01, 100), min_size=1, max_size=4),
    position=st.integers(0, 3 * BLOCK),
    seed=st.integers(0, 9),
)
def test_what_a_source_has_passed_is_taken(weights, position, seed):
    schedule = MixtureSchedule(weights, seed)
    taken: list[set[int]] = [set() for _ in weights]
    for source, before in map(schedule.at, range(position)):
        taken[source].add(before)
    for source, numbers in enumerate(taken):
        passed = schedule.passed(position, source)
        assert numbers.issuperset(range(passed)) and passed >= len(numbers) - (BLOCK if len(weights) > 1 else 0)


def test_a_far_position_costs_no_more_and_rounds_nothing():
    schedule = MixtureSchedule([0.1, 0.2, 0.7], 3)
    start = 10**15 // BLOCK * BLOCK
    counts = Counter(schedule.at(start + offset)[0] for offset in range(10 * BLOCK))
    assert [counts[source] for source in range(3)] == pytest.approx([256, 512, 1792], abs=3)


def test_no_rank_meets_one_source_alone():
    """Two sources of the same weight would alternate, and each of two ranks see one of them."""
    schedule = MixtureSchedule([1, 1], 0)
    even = [schedule.at(position)[0] for position in range(0, 4 * BLOCK, 2)]
    assert 0.4 < np.mean(even) < 0.6
