"""Rollouts from which nothing could be learned are told from those that have an advantage somewhere."""

from __future__ import annotations

from typing import Any

import pytest

from armature.components.rl.metrics import no_signal
from armature.components.rollouts.settings import BatchSettings
from tests.rollouts.batches.conftest import batch_settings, trajectory, walk

GROUP_MEAN: dict[str, Any] = {"name": "group_mean", "scale": "group_std"}


def settings(**penalty: float) -> BatchSettings:
    return batch_settings(GROUP_MEAN, **penalty)


@pytest.mark.parametrize(
    ("rewards", "said"),
    [
        ({"g1": (0.0, 0.0), "g2": (0.0, 0.0)}, "4 rollouts of 2 groups: each earned 0. The first ended with 'x'"),
        ({"g1": (1.0, 1.0), "g2": (0.0, 0.0)}, "members of a group all earned the same"),
        ({"g1": (1.0,), "g2": (0.0,)}, "members of a group all earned the same"),
        ({"g1": (1.0, 1.0), "g2": (0.0, 1.0)}, None),
        ({}, None),
    ],
)
def test_groups_that_agree_teach_nothing(rewards: dict[str, tuple[float, ...]], said: str | None) -> None:
    played = [
        trajectory(f"{group}-{member}", group, reward)
        for group, earned in rewards.items()
        for member, reward in enumerate(earned)
    ]
    found = no_signal(played, settings())
    assert (found is None) == (said is None) and (said or "") in (found or "")


def test_a_penalty_is_a_signal() -> None:
    played = [walk("a", "s", [0.0]), walk("b", "s", [0.0], defects="f")]
    assert no_signal(played, settings()) is not None
    assert no_signal(played, settings(format=0.1)) is None
