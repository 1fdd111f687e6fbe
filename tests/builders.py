"""Rows of rollouts and batches for tests, with defaults for every field."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from armature.components.contracts.batches import Sample
from armature.components.contracts.machine import Machine
from armature.components.contracts.rollouts import Trajectory, Turn


def make_turn(reward: float = 0.0, **changes: Any) -> Turn:
    """Return a turn with one sampled token. `changes` replace fields; lists of token ids and log-probs are converted to
    arrays of the right dtype."""
    fields: dict[str, Any] = {
        "index": 0,
        "prompt_token_ids": [5, 6],
        "completion_token_ids": [7],
        "completion_logprobs": [-0.5],
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
    fields |= changes
    for name in ("prompt_token_ids", "completion_token_ids"):
        fields[name] = np.asarray(fields[name], np.int32)
    fields["completion_logprobs"] = np.asarray(fields["completion_logprobs"], np.float32)
    return Turn(**fields)


def make_trajectory(name: str, group: str, turns: Sequence[Turn], **changes: Any) -> Trajectory:
    """Return the trajectory of a finished training episode in the environment "colors". `changes` replace fields."""
    fields = {"environment": "colors", "task_id": "t", "split": "train", "truncated": False} | changes
    return Trajectory(trajectory_id=name, group_id=group, turns=tuple(turns), **fields)


def make_sample(name: str = "s", prompt: int = 2, completion: int = 2, **changes: Any) -> Sample:
    """Return a sample of `prompt` tokens followed by `completion` trained tokens. The token ids are 5, 6, 7 and so on.
    `changes` replace fields."""
    trained = np.arange(prompt + completion) >= prompt
    fields: dict[str, Any] = {
        "sample_id": name,
        "group_id": "g",
        "trajectory_id": name,
        "input_ids": np.arange(5, 5 + len(trained), dtype=np.int32),
        "loss_mask": trained,
        "behavior_logprobs": np.where(trained, -0.5, 0).astype(np.float32),
        "policy_versions": np.where(trained, 3, -1).astype(np.int32),
        "advantages": np.where(trained, 1, 0).astype(np.float32),
        "reward": 1.0,
        "images": (),
    }
    return Sample(**(fields | changes))


def make_machine(base: Machine | None = None, **changes: Any) -> Machine:
    """Return the machine `base` with changed settings, written SECTION__KEY, such as `trainer__gpus=(0,)`.

    The section can be left out if only one section has this key: `ready_timeout=5.0`.
    """
    values = (base or Machine()).model_dump()
    sections = [name for name, value in values.items() if isinstance(value, dict) and name != "cluster"]
    for name, value in changes.items():
        section, _, key = name.rpartition("__")
        if name not in values and not section:
            (section,) = (each for each in sections if key in values[each])
        (values[section] if section else values)[key] = str(value) if key.endswith("store") else value
    return Machine.model_validate(values)
