"""Rollouts that are given by their rewards, states and defects."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from armature.components.batches.settings import BatchSettings
from armature.components.contracts.rollouts import Trajectory, Turn


def turn(reward: float = 0.0, index: int = 0, **changes: Any) -> Turn:
    fields: dict[str, Any] = {
        "index": index,
        "prompt_token_ids": np.array([5, 6], dtype=np.int32),
        "completion_token_ids": np.array([7], dtype=np.int32),
        "completion_logprobs": np.array([-0.5], dtype=np.float32),
        "finish_reason": "stop",
        "policy_version": 3,
        "images": (),
        "messages": "[]",
        "completion": "x",
        "reward": reward,
        "reward_parts": {"correct": reward},
        "anchor_key": None,
        "admissible_key": None,
        "action_defect": None,
        "generate_seconds": 0.0,
        "environment_seconds": 0.0,
    }
    return Turn(**(fields | changes))


def played(name: str, group: str, turns: Sequence[Turn]) -> Trajectory:
    return Trajectory(name, group, "colors", "t", "train", tuple(turns), False)


def trajectory(name: str, group: str, *rewards: float) -> Trajectory:
    return played(name, group, [turn(reward, index) for index, reward in enumerate(rewards)])


def walk(name: str, states: str, rewards: Sequence[float], defects: str = "", group: str = "g") -> Trajectory:
    """One turn per letter of `states`; `defects` has f for an unreadable answer, i for an inadmissible one."""
    kinds = {"f": "format", "i": "inadmissible"}
    return played(
        name,
        group,
        [
            turn(reward, index, anchor_key=state, action_defect=kinds.get(defects[index : index + 1]))
            for index, (state, reward) in enumerate(zip(states, rewards, strict=True))
        ],
    )


def batch_settings(advantage: dict[str, Any], format: float = 0.0, inadmissible: float = 0.0) -> BatchSettings:
    return BatchSettings.model_validate(
        {
            "advantage": advantage,
            "penalty": {"format": format, "inadmissible": inadmissible},
            "skip_zero_advantage": True,
            "max_sequence_tokens": 100,
        }
    )
