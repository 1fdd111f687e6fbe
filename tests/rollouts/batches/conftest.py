"""Rollouts that are given by their rewards, states and defects."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from armature.components.contracts.rollouts import Trajectory
from armature.components.rollouts.settings import BatchSettings
from tests.builders import make_trajectory, make_turn


def trajectory(name: str, group: str, *rewards: float) -> Trajectory:
    return make_trajectory(name, group, [make_turn(reward, index=index) for index, reward in enumerate(rewards)])


GROUPS = [
    trajectory("a", "g1", 1.0),
    trajectory("b", "g1", 0.0),
    trajectory("c", "g1", 0.0, 2.0),
    trajectory("d", "g2", 0.5),
    trajectory("e", "g2", 0.5),
    trajectory("f", "g3", 9.0),
]


def walk(name: str, states: str, rewards: Sequence[float], defects: str = "", group: str = "g") -> Trajectory:
    """Return a trajectory with one turn for each letter of `states`, which is the turn's anchor key.

    In `defects`, an f at the turn's place stands for an answer that cannot be parsed, and an i for an inadmissible
    action.
    """
    kinds = {"f": "format", "i": "inadmissible"}
    turns = [
        make_turn(reward, index=index, anchor_key=state, action_defect=kinds.get(defects[index : index + 1]))
        for index, (state, reward) in enumerate(zip(states, rewards, strict=True))
    ]
    return make_trajectory(name, group, turns)


def batch_settings(advantage: dict[str, Any], format: float = 0.0, inadmissible: float = 0.0) -> BatchSettings:
    return BatchSettings.model_validate(
        {
            "advantage": advantage,
            "penalty": {"format": format, "inadmissible": inadmissible},
            "skip_zero_advantage": True,
            "max_sequence_tokens": 100,
        }
    )
