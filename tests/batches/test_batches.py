"""Advantages against hand-computed values, and the batch table against its rows."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from components.batches.advantages import group_advantages
from components.batches.build import build_batch
from components.batches.settings import BatchSettings
from components.batches.table import read_batch, write_batch
from components.contracts.batches import Sample
from components.contracts.images import ImageRef
from components.contracts.rollouts import GenerateOutputs, Trajectory, Turn


def turn(reward: float) -> Turn:
    return Turn(
        index=0,
        prompt_token_ids=np.array([5, 6], dtype=np.int32),
        completion_token_ids=np.array([7], dtype=np.int32),
        completion_logprobs=np.array([-0.5], dtype=np.float32),
        finish_reason="stop",
        policy_version=3,
        images=(),
        messages="[]",
        completion="x",
        reward=reward,
        reward_parts={"correct": reward},
        anchor_key=None,
        action_valid=True,
        generate_seconds=0.0,
        environment_seconds=0.0,
    )


def trajectory(name: str, group: str, *rewards: float) -> Trajectory:
    return Trajectory(name, group, "colors", "t", "train", tuple(turn(reward) for reward in rewards), False)


def sample(of: Trajectory, length: int = 3) -> Sample:
    mask = np.zeros(length, dtype=np.bool_)
    mask[-1] = True
    return Sample(
        sample_id=of.trajectory_id,
        group_id=of.group_id,
        trajectory_id=of.trajectory_id,
        input_ids=np.arange(length, dtype=np.int32),
        loss_mask=mask,
        behavior_logprobs=np.where(mask, np.float32(-0.5), np.float32(0)),
        policy_versions=np.where(mask, 3, -1).astype(np.int32),
        advantages=np.zeros(length, dtype=np.float32),
        reward=of.reward,
        images=(ImageRef("a" * 64, "image/png", 4, 5),),
    )


class OneSampleEach:
    """The simplest adapter: every trajectory is one sample."""

    def samples(self, outputs):
        return [sample(each) for each in outputs.trajectories], Counter(odd=1)


GROUPS = [
    trajectory("a", "g1", 1.0),
    trajectory("b", "g1", 0.0),
    trajectory("c", "g1", 0.0, 2.0),
    trajectory("d", "g2", 0.5),
    trajectory("e", "g2", 0.5),
    trajectory("f", "g3", 9.0),
]


def test_group_std_by_hand():
    found = group_advantages(GROUPS, "group_std")
    std = math.sqrt(2 / 3)  # rewards 1, 0, 2: mean 1, population variance 2/3
    assert found.by_trajectory == pytest.approx(
        {"a": 0.0, "b": -1 / (std + 1e-4), "c": 1 / (std + 1e-4), "d": 0.0, "e": 0.0, "f": 0.0}
    )
    assert found.zero_variance == {"g2", "g3"} and found.groups == 3


def test_unscaled_and_batch_scaled_by_hand():
    assert group_advantages(GROUPS, "none").by_trajectory == pytest.approx(
        {"a": 0.0, "b": -1.0, "c": 1.0, "d": 0.0, "e": 0.0, "f": 0.0}
    )
    std = math.sqrt(2 / 6)  # centred rewards 0, -1, 1, 0, 0, 0
    assert group_advantages(GROUPS, "batch_std").by_trajectory["c"] == pytest.approx(1 / (std + 1e-4))


@given(st.lists(st.tuples(st.integers(0, 3), st.floats(-5, 5)), max_size=20), st.sampled_from(["group_std", "none"]))
def test_advantages_of_a_group_sum_to_zero(members, scale):
    rows = [trajectory(str(number), f"g{group}", reward) for number, (group, reward) in enumerate(members)]
    found = group_advantages(rows, scale)
    for group in {row.group_id for row in rows}:
        total = sum(found.by_trajectory[row.trajectory_id] for row in rows if row.group_id == group)
        assert total == pytest.approx(0.0, abs=1e-6)


def test_build_counts_every_drop():
    settings = BatchSettings(scale="none", skip_zero_variance=True, max_sequence_tokens=100)
    built = build_batch(GenerateOutputs(GROUPS), OneSampleEach(), settings)
    assert [each.sample_id for each in built.samples] == ["a", "b", "c"]
    assert built.drops == {"odd": 1, "zero_variance_group": 3}
    assert built.samples[1].advantages.tolist() == [0.0, 0.0, -1.0]
    assert built.metrics["groups/zero_variance_fraction"] == pytest.approx(2 / 3)


def test_the_table_returns_the_samples(tmp_path):
    samples = [sample(each, length) for each, length in zip(GROUPS, (3, 1, 7, 2, 4, 5), strict=True)]
    write_batch(tmp_path, samples)
    found = read_batch(tmp_path)
    for expected, actual in zip(samples, found, strict=True):
        for name, value in vars(expected).items():
            if isinstance(value, np.ndarray):
                assert np.array_equal(value, getattr(actual, name)) and value.dtype == getattr(actual, name).dtype
            else:
                assert value == getattr(actual, name)


def test_an_empty_table_is_a_table(tmp_path):
    write_batch(tmp_path, [])
    assert read_batch(tmp_path) == []
