"""Advantages of trajectories against hand-computed values."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from armature.components.contracts.rollouts import Trajectory
from armature.components.rollouts.batches.advantages import turn_advantages
from tests.refusals import refused

from .conftest import GROUPS, batch_settings, trajectory, walk


def of(trajectories: list[Trajectory], advantage: dict[str, Any], **penalty: float) -> dict[str, list[float]]:
    """Return the advantages of each trajectory's turns, by trajectory id."""
    by_turn = turn_advantages(trajectories, batch_settings(advantage, **penalty)).by_turn
    return {one.trajectory_id: [by_turn[one.trajectory_id, each.index] for each in one.turns] for one in trajectories}


def group_mean(scale: str, **more: str) -> dict[str, Any]:
    return {"name": "group_mean", "scale": scale, **more}


def expect(**values: list[float]) -> Any:
    return {name: pytest.approx(value) for name, value in values.items()}


def test_group_std_advantages_by_hand():
    std = 1.0  # rewards 1, 0, 2: mean 1, sample variance 2 / (3 - 1)
    high, low = 1 / (std + 1e-4), -1 / (std + 1e-4)
    assert of(GROUPS, group_mean("group_std")) == expect(a=[0], b=[low], c=[high, high], d=[0], e=[0], f=[0])
    result = turn_advantages(GROUPS, batch_settings(group_mean("group_std")))
    assert result.without_gradient == {"g2", "g3"}
    assert result.metrics["groups/count"] == 3 and result.metrics["groups/zero_advantage_fraction"] == 2 / 3
    assert result.metrics["advantage/turn_absmean"] == pytest.approx(3 * high / 7)


def test_unscaled_and_batch_scaled_advantages_by_hand():
    assert of(GROUPS, group_mean("none")) == expect(a=[0], b=[-1], c=[1, 1], d=[0], e=[0], f=[0])
    std = math.sqrt(2 / 5)  # centered rewards 0, -1, 1, 0, 0, 0
    assert of(GROUPS, group_mean("batch_std"))["c"] == pytest.approx([1 / (std + 1e-4)] * 2)


@given(
    st.lists(st.tuples(st.integers(0, 3), st.sampled_from([-1.5, 0.0, 0.25, 1.0, 7.0])), max_size=20),
    st.sampled_from(["group_std", "batch_std"]),
    st.sampled_from(["sample", "population", None]),
)
def test_deviations_equal_numpy(members, scale, deviation):
    """The default is the sample deviation, which torch.std, and so TRL and verl, divide by."""
    rows = [trajectory(str(number), f"g{group}", reward) for number, (group, reward) in enumerate(members)]
    ddof = 0 if deviation == "population" else 1
    centered = {}
    for group in {group for group, _ in members}:
        rewards = {number: reward for number, (other, reward) in enumerate(members) if other == group}
        centered[group] = {number: reward - np.mean([*rewards.values()]) for number, reward in rewards.items()}
    every = [value for group in centered.values() for value in group.values()]
    expected = {}
    for group in centered.values():
        compared = every if scale == "batch_std" else [*group.values()]
        std = np.std(compared, ddof=ddof) if len(compared) > 1 else 0.0
        expected |= {str(number): [value / (std + 1e-4)] for number, value in group.items()}
    result = of(rows, group_mean(scale, **({"deviation": deviation} if deviation else {})))
    assert result == {name: pytest.approx(value, abs=1e-9) for name, value in expected.items()}


def test_rejects_deviation_without_scaling():
    with refused("value_error", "deviation"):
        batch_settings(group_mean("none", deviation="population"))


def test_penalty_lowers_its_turn_and_the_baseline():
    pair = [walk("a", "xyz", [0, 0, 1.0], " fi"), walk("b", "x", [0.0])]
    # Scores of a: 1, 0.7, 0.9, on average 13/15; of b: 0. The baseline is 13/30, without penalties 1/2.
    assert of(pair, group_mean("none"), format=0.3, inadmissible=0.1) == expect(
        a=[1 - 13 / 30, 0.7 - 13 / 30, 0.9 - 13 / 30], b=[-13 / 30]
    )
    assert of(pair, {"name": "rloo"}, format=0.3, inadmissible=0.1) == expect(a=[1, 0.7, 0.9], b=[-13 / 15])
    metrics = turn_advantages(pair, batch_settings(group_mean("none"), format=0.3, inadmissible=0.1)).metrics
    assert metrics["penalty/turns"] == 2 and metrics["penalty/mean"] == pytest.approx(0.1)


def test_penalty_in_equal_trajectories_has_a_deviation_floor():
    pair = [walk("a", "xy", [0, 0], "f"), walk("b", "xy", [0, 0], "f")]
    result = of(pair, group_mean("group_std", deviation="population"), format=0.1)  # scores -0.1, 0, -0.1, 0
    assert result["a"] == result["b"] == pytest.approx([-1, 1], rel=3e-3)


@given(rewards=st.lists(st.floats(-5, 5), min_size=2, max_size=8))
def test_leave_one_out_equals_scaled_group_mean(rewards):
    """R - mean of the others = n / (n - 1) * (R - mean of all)."""
    rows = [trajectory(str(number), "g", reward) for number, reward in enumerate(rewards)]
    left_out, mean = of(rows, {"name": "rloo"}), of(rows, group_mean("none"))
    stretch = len(rewards) / (len(rewards) - 1)
    assert {name: value[0] for name, value in left_out.items()} == pytest.approx(
        {name: stretch * value[0] for name, value in mean.items()}, abs=1e-9
    )


def test_rejects_duplicate_trajectory():
    with refused("trajectory_repeated", GROUPS[0].trajectory_id):
        turn_advantages([GROUPS[0], GROUPS[1], GROUPS[0]], batch_settings(group_mean("none")))


def test_invalid_reward_leaves_its_group_unchanged():
    broken = trajectory("z", "g1", math.nan)
    by_turn = turn_advantages([broken, *GROUPS], batch_settings(group_mean("group_std"))).by_turn
    assert by_turn == turn_advantages(GROUPS, batch_settings(group_mean("group_std"))).by_turn
    assert all(np.isfinite(value) for value in by_turn.values())
