"""GiGPO against a computation by hand, and against its definition in plain loops."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from armature.components.contracts.rollouts import Trajectory
from armature.components.rollouts.batches.advantages import turn_advantages
from tests.refusals import refused

from .conftest import batch_settings, trajectory, walk

FORMAT, INADMISSIBLE = 0.4, 0.2
MEAN = {"name": "mean_norm"}
GROUP = [  # x is met five times, y twice with equal returns, z and w once
    walk("a", "xyz", [0, 0, 4]),
    walk("b", "xy", [0, 2], "f"),
    walk("c", "xwxx", [0, 0, 0, 0], " i"),
]


def std(floor: float = 0.0, deviation: str = "sample") -> dict[str, Any]:
    return {"name": "mean_std_norm", "std_floor": floor, "deviation": deviation}


def gigpo(norm: dict[str, Any], count: str = "trajectories", **changes: Any) -> dict[str, Any]:
    chosen = {"gamma": 0.5, "step_weight": 3.0, "statistics": count, "norm": norm, "anchor": {"name": "exact"}}
    return {"name": "gigpo", **chosen, **changes}


def of(trajectories: Sequence[Trajectory], advantage: dict[str, Any], **penalty: float) -> list[float]:
    penalties = {"format": FORMAT, "inadmissible": INADMISSIBLE} | penalty
    by_turn = turn_advantages(trajectories, batch_settings(advantage, **penalties)).by_turn
    return [by_turn[one.trajectory_id, turn.index] for one in trajectories for turn in one.turns]


# Scores: a 4 4 4, b 1.6 2, c 0 -0.2 0 0. Every trajectory once: the mean of 4, 1.8 and -0.05; every row: 15.4 / 9.
# Variances: (2.083333^2 + (0.316667^2 + 0.083333^2) / 2 + (3 * 1.916667^2 + 2.116667^2) / 4) / (3 - 1) = 4.134583
# and (3 * 2.288889^2 + 0.111111^2 + 0.288889^2 + 3 * 1.711111^2 + 1.911111^2) / (9 - 1) = 3.531111.
BY_TRAJECTORY = [2.083333, 2.083333, 2.083333, -0.316667, 0.083333, -1.916667, -2.116667, -1.916667, -1.916667]
BY_ROW = [2.288889, 2.288889, 2.288889, -0.111111, 0.288889, -1.711111, -1.911111, -1.711111, -1.711111]
# Returns with gamma 0.5: a 1 2 4, b 1 - 0.4 and 2, c 0 -0.2 0 0. At x: 1, 0.6, 0, 0, 0 with mean 0.32 and variance
# (0.68^2 + 0.28^2 + 3 * 0.32^2) / 4 = 0.212; at y twice 2; z and w are met once.
AT_STATE = [0.68, 0, 0, 0.28, 0, -0.32, 0, -0.32, -0.32]


@pytest.mark.parametrize(
    ("count", "episode", "variance"), [("trajectories", BY_TRAJECTORY, 4.134583), ("rows", BY_ROW, 3.531111)]
)
def test_advantages_equal_values_by_hand(count, episode, variance):
    centered = [first + 3 * second for first, second in zip(episode, AT_STATE, strict=True)]
    assert of(GROUP, gigpo(MEAN, count)) == pytest.approx(centered, abs=2e-6)
    scales = math.sqrt(variance) + 1e-6, math.sqrt(0.212) + 1e-6
    scaled = [first / scales[0] + 3 * second / scales[1] for first, second in zip(episode, AT_STATE, strict=True)]
    assert of(GROUP, gigpo(std(), count)) == pytest.approx(scaled, abs=2e-6)
    assert of(GROUP, gigpo({"name": "mean_std_norm"}, count)) == of(GROUP, gigpo(std(), count))
    counted = 3 if count == "trajectories" else 9
    scales = math.sqrt(variance * (counted - 1) / counted) + 1e-6, math.sqrt(0.212 * 4 / 5) + 1e-6
    scaled = [first / scales[0] + 3 * second / scales[1] for first, second in zip(episode, AT_STATE, strict=True)]
    assert of(GROUP, gigpo(std(deviation="population"), count)) == pytest.approx(scaled, abs=2e-6)


def test_batch_metrics_describe_groups():
    metrics = turn_advantages(GROUP, batch_settings(gigpo(MEAN), FORMAT, INADMISSIBLE)).metrics
    assert metrics["advantage/episode_absmean"] == pytest.approx(sum(map(abs, BY_TRAJECTORY)) / 9, abs=2e-6)
    assert metrics["advantage/step_absmean"] == pytest.approx((0.68 + 0.28 + 3 * 0.32) / 9)
    assert metrics["anchors/size"] == 9 / 4 and metrics["anchors/size_max"] == 5
    assert metrics["anchors/singleton_fraction"] == 2 / 4
    assert metrics["penalty/turns"] == 2 and metrics["penalty/mean"] == pytest.approx(0.6 / 9)


def test_deviation_floor_limits_format_errors():
    failed = [walk(str(number), "x", [0], "f" if number == 0 else "") for number in range(8)]
    alone = gigpo(std(), step_weight=0.0)
    assert of(failed, alone, format=0.1) == pytest.approx([-2.475] + [0.354] * 7, abs=1e-3)
    assert of(failed, gigpo(MEAN, step_weight=0.0), format=0.1) == pytest.approx([-0.0875] + [0.0125] * 7)
    bounded = of(failed, gigpo(std(1.0), step_weight=1.0), format=0.1)
    assert bounded == pytest.approx([-0.175] + [0.025] * 7, rel=1e-5)  # of the trajectory and, as much, at x
    mixed = [*failed[:-1], walk("7", "x", [10])]
    assert of(mixed, gigpo(std(1.0)), format=0.1) == of(mixed, gigpo(std()), format=0.1)  # real differences stay


def test_single_trajectory_has_no_baseline():
    assert of([walk("a", "xy", [0, 4])], gigpo(std())) == [0, 0]
    pair = [walk("d", "xy", [0.1, 0.2], group="h"), walk("e", "xyz", [0.3, 0.0, 0.0], group="h")]
    assert of(pair, gigpo(std(), gamma=1.0, step_weight=0.0)) == [0] * 5  # 0.1 + 0.2 is not quite 0.3
    result = turn_advantages([*GROUP, *pair], batch_settings(gigpo(MEAN, step_weight=0.0)))
    assert result.without_gradient == {"h"}


def test_gigpo_rewards_the_faster_of_equal_outcomes():
    pair = [walk("fast", "xy", [0, 8]), walk("slow", "xzy", [0, 0, 8])]
    assert of(pair, gigpo(MEAN, step_weight=1.0)) == pytest.approx([1, 0, -1, 0, 0])  # at x 4 against 2
    assert turn_advantages(pair, batch_settings(gigpo(MEAN))).without_gradient == frozenset()


def test_rejects_gigpo_without_state_keys():
    with refused("anchor_key_missing", "batches.advantage"):
        of([trajectory("a", "g", 1.0), trajectory("b", "g", 0.0)], gigpo(MEAN))
    assert of([], gigpo(MEAN)) == []


@st.composite
def rollouts(draw: st.DrawFn) -> list[Trajectory]:
    result = []
    for number in range(draw(st.integers(1, 7))):
        states = draw(st.text("xyz", min_size=1, max_size=5))
        rewards = draw(st.lists(st.integers(-2, 2), min_size=len(states), max_size=len(states)))
        defects = draw(st.text(" fi", min_size=len(states), max_size=len(states)))
        result.append(walk(str(number), states, rewards, defects, group=draw(st.sampled_from("gh"))))
    return result


def naive(
    trajectories: list[Trajectory], count: str, floor: float | None, gamma: float, weight: float
) -> dict[tuple[str, int], float]:
    """Return GiGPO's advantages, computed from their definition for one turn at a time.

    To let each trajectory count once in a mean, its turns are repeated until all trajectories of the group have the
    same number.
    """

    def norm(value: float, everything: list[float], degrees: float) -> float:
        if max(everything) == min(everything):
            return 0.0
        difference = value - statistics.fmean(everything)
        if floor is None:
            return difference
        variance = statistics.pvariance(everything) * degrees / (degrees - 1)
        return difference / (max(math.sqrt(variance), floor) + 1e-6)

    cost = {None: 0.0, "format": FORMAT, "inadmissible": INADMISSIBLE}
    result = {}
    for one in trajectories:
        group = [other for other in trajectories if other.group_id == one.group_id]
        times = math.lcm(*(len(other.turns) for other in group))
        scores = [
            other.reward - cost[turn.action_defect]
            for other in group
            for turn in other.turns
            for _ in range(times // len(other.turns) if count == "trajectories" else 1)
        ]
        for turn in one.turns:

            def step_return(of: Trajectory, start: int) -> float:
                ahead = sum(gamma ** (later.index - start) * later.reward for later in of.turns[start:])
                return ahead - cost[of.turns[start].action_defect]

            same = [
                step_return(other, met.index)
                for other in group
                for met in other.turns
                if met.anchor_key == turn.anchor_key
            ]
            episode = 0.0
            if len(group) > 1:
                degrees = len(group) if count == "trajectories" else len(scores)
                episode = norm(one.reward - cost[turn.action_defect], scores, degrees)
            result[one.trajectory_id, turn.index] = episode + weight * norm(
                step_return(one, turn.index), same, len(same)
            )
    return result


@settings(max_examples=150)
@given(
    trajectories=rollouts(),
    count=st.sampled_from(["trajectories", "rows"]),
    floor=st.sampled_from([None, 0.0, 0.7]),
    gamma=st.sampled_from([0.0, 0.5, 0.95, 1.0]),
    weight=st.sampled_from([0.0, 1.0, 2.5]),
)
def test_gigpo_equals_plain_loops(trajectories, count, floor, gamma, weight):
    norm = MEAN if floor is None else std(floor)
    chosen = batch_settings(gigpo(norm, count, gamma=gamma, step_weight=weight), FORMAT, INADMISSIBLE)
    expected = naive(trajectories, count, floor, gamma, weight)
    # Without a floor a deviation may be a rounding error: 1e-12 is then a ten-thousandth of it.
    assert turn_advantages(trajectories, chosen).by_turn == pytest.approx(expected, abs=1e-4)
