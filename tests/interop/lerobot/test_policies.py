"""LeRobot reads what we write, and we what it saves: equal actions for one observation."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from armature.components.contracts.robots import RobotObservation
from armature.components.robots.policies.molmoact2.checkpoints.checkpoint import (
    LoadedPolicy,
    load_policy,
    save_lerobot,
    save_policy,
)
from armature.components.robots.policies.molmoact2.checkpoints.tiny import make_tiny_policy
from armature.components.robots.policies.molmoact2.policy import MolmoAct2Policy
from armature.components.robots.policies.norm_stats import RobotMetadata
from tests.robots.policies.molmoact2 import released
from tests.robots.policies.test_stage import TINY as SMALL

from .conftest import Side

SEED = 11  # as in policies_side.py
TINY = SMALL.model_copy(update={"max_action_dim": 32})  # LeRobot takes no other
SETTINGS = released.SETTINGS.model_copy(
    update={
        "semantics": "0.6.1",
        "chunk_size": TINY.max_action_horizon,
        "n_action_steps": TINY.max_action_horizon,
        "image_keys": released.CAMERAS,
        "setup_type": "an arm",
        "control_mode": "joint pose",
    }
)
STATISTICS = {"action": released.statistics(7, seed=1), "observation.state": released.statistics(8, seed=2)}


@pytest.fixture(scope="module")
def observation() -> RobotObservation:
    rng = np.random.default_rng(0)
    return RobotObservation(
        images={key: rng.integers(0, 256, (30, 40, 3), dtype=np.uint8) for key in released.CAMERAS},
        state=rng.uniform(-1, 1, 8).astype(np.float32),
        task="Pick up the black bowl!",
    )


@pytest.fixture(scope="module")
def policy(tmp_path_factory) -> LoadedPolicy:
    """A tiny policy with normalization statistics. Its action expert has random weights, so that actions are not 0."""
    import torch

    folder = make_tiny_policy(
        tmp_path_factory.mktemp("tiny") / "checkpoint", SETTINGS.model_copy(update={"tiny": TINY})
    )
    robot = RobotMetadata(
        action_stats=STATISTICS["action"], state_stats=STATISTICS["observation.state"], normalize_gripper=True
    )
    loaded = load_policy(folder, SETTINGS, robot)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in loaded.model.action_expert.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return loaded


def ask_lerobot(
    side: Side, order: str, folder: Path, observation: RobotObservation, *more: str | Path
) -> NDArray[np.float32]:
    arguments, answer = folder.parent / "observation.npz", folder.parent / "answer.npy"
    facts = {"chunk_size": SETTINGS.chunk_size, "action_dimensions": 7, "statistics": STATISTICS}
    np.savez(
        arguments,
        cameras=np.array(list(observation.images)),
        state=observation.state,
        task=observation.task,
        facts=json.dumps(facts),
        **observation.images,
    )
    side(order, folder, arguments, answer, *more)
    result: NDArray[np.float32] = np.load(answer)
    return result


def answer(loaded: LoadedPolicy, observation: RobotObservation) -> NDArray[np.float32]:
    return MolmoAct2Policy(loaded.model, loaded.processor(), loaded.settings, "continuous", rows=1).predict(
        [observation], [SEED]
    )[0]


def test_lerobot_predicts_our_actions_from_our_checkpoint(policy, observation, policies_side, tmp_path):
    state = policy.model.state_dict()
    base = save_policy(tmp_path / "released", policy.parts, state)
    folder = save_lerobot(tmp_path / "lerobot", policy.parts, state, base=str(base))
    theirs = ask_lerobot(policies_side, "act", folder, observation)
    np.testing.assert_allclose(theirs, answer(policy, observation), atol=2e-6)
    assert np.ptp(theirs, axis=0).max() > 0.1


@pytest.mark.parametrize("mode", ["plain", "lora"])
def test_we_predict_lerobot_actions_from_its_checkpoint(policy, observation, policies_side, tmp_path, mode):
    base = save_policy(tmp_path / "released", policy.parts, policy.model.state_dict())
    saved = tmp_path / "pretrained_model"
    theirs = ask_lerobot(policies_side, "create", base, observation, saved, mode)
    blank = SETTINGS.model_copy(update={"setup_type": "", "control_mode": "", "image_keys": (), "chunk_size": 1})
    loaded = load_policy(saved, blank.model_copy(update={"checkpoint_path": None}))
    np.testing.assert_allclose(theirs, answer(loaded, observation), atol=5e-6)
    assert (np.abs(theirs - answer(policy, observation)).max() > 1e-3) is np.bool_(mode == "lora")
