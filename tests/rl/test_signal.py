"""The warning about rollouts from which nothing can be learned."""

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
    ("rewards", "warning"),
    [
        ({"g1": (0.0, 0.0), "g2": (0.0, 0.0)}, "4 rollouts of 2 groups: each earned 0. The first one ended with 'x'"),
        ({"g1": (1.0, 1.0), "g2": (0.0, 0.0)}, "members of a group all earned the same"),
        ({"g1": (1.0,), "g2": (0.0,)}, "members of a group all earned the same"),
        ({"g1": (1.0, 1.0), "g2": (0.0, 1.0)}, None),
        ({}, None),
    ],
)
def test_warns_if_all_groups_have_equal_rewards(rewards: dict[str, tuple[float, ...]], warning: str | None) -> None:
    played = [
        trajectory(f"{group}-{member}", group, reward)
        for group, earned in rewards.items()
        for member, reward in enumerate(earned)
    ]
    message = no_signal(played, settings())
    assert (message is None) == (warning is None) and (warning or "") in (message or "")


def test_format_penalty_counts_as_signal() -> None:
    played = [walk("a", "s", [0.0]), walk("b", "s", [0.0], defects="f")]
    assert no_signal(played, settings()) is not None
    assert no_signal(played, settings(format=0.1)) is None
