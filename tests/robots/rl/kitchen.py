"""A tiny MolmoAct2 that plays in the plane of the evaluation's tests, without a simulator."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from armature.components.contracts.robots import RobotObservation
from armature.components.robots.libero.processes import ChunkResult
from armature.components.robots.libero.settings import Perturbation
from armature.components.robots.libero.tasks import LiberoTask
from armature.components.robots.policies.molmoact2.checkpoints.checkpoint import LoadedPolicy, load_policy, save_policy
from armature.components.robots.rl.settings import RobotRolloutSettings
from tests.robots.evaluation.playground import Plane
from tests.robots.policies.molmoact2 import released

WAY = 0.4


class Kitchen(Plane):
    """The simulator `Plane`, with observations in the format of the released policy's tag "kitchen". An episode is
    solved when the point is `WAY` left of its start."""

    def __init__(self, deaths: Sequence[int] = ()) -> None:
        super().__init__(deaths)
        self._starts: dict[int, float] = {}

    def step(self, actions: NDArray[np.float32], slot: int = 0, film: bool = False) -> ChunkResult:
        carried = super().step(actions, slot, film)
        return replace(carried, success=bool(carried.observation.state[0] < self._starts[slot] - WAY))

    def reset(
        self,
        task: LiberoTask,
        initial_state: int,
        seed: int,
        slot: int = 0,
        perturbation: Perturbation | None = None,
    ) -> RobotObservation:
        seen = super().reset(task, initial_state, seed, slot, perturbation)
        self._starts[slot] = float(seen.state[0])
        return seen

    def _observe(self, slot: int) -> RobotObservation:
        seen = super()._observe(slot)
        images = dict(zip(released.CAMERAS, seen.images.values(), strict=True))
        return RobotObservation(images, np.pad(seen.state, (0, 6)), seen.task)


def calm_policy(folder: Path, **changes: Any) -> LoadedPolicy:
    """Write a policy to `folder`/checkpoint and return it. Its velocities are about 1, as in a trained policy.

    `changes` replace settings of the written policy.
    """
    settings = released.SETTINGS.model_copy(update={"norm_tag": "kitchen", "num_inference_steps": 4})
    loaded = load_policy(released.write_released(folder / "released"), settings)
    with torch.no_grad():
        loaded.model.action_expert.final_layer.linear.weight.mul_(0.3)
    parts = replace(loaded.parts, settings=loaded.settings.model_copy(update=changes))
    save_policy(folder / "checkpoint", parts, loaded.model.state_dict())
    return loaded


def rollout_settings(**changes: Any) -> RobotRolloutSettings:
    values = {
        "suite": "libero_spatial",
        "tasks": (0, 2),
        "initial_states": (0, 3),
        "groups_per_step": 2,
        "group_size": 4,
        "max_steps": 8,
        "noise_level": 0.5,
        "batch": 1,
        "rows_per_pass": 1,
    }
    return RobotRolloutSettings.model_validate(values | changes)
