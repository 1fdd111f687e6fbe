"""Our SmolVLA beside LeRobot's: actions, losses and gradient norms on the same weights, batches and noise."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from armature.components.contracts.robots import RobotObservation
from armature.components.robots.imitation.data import PolicyMicroBatch
from armature.components.robots.imitation.learner import PolicyLearner
from armature.components.robots.imitation.opening import prepare
from armature.components.robots.imitation.settings import VLATrainerSettings
from armature.components.robots.policies.family import family, load_model
from armature.components.robots.policies.flow import FlowSamples
from armature.components.robots.policies.player import open_flow_policy
from armature.components.robots.policies.settings import RobotPolicySettings
from armature.components.robots.policies.smolvla.checkpoint import load_parts, save_policy

from . import conftest
from .test_external import CAMERAS, SEEDS, TASKS

SETTINGS = RobotPolicySettings(family="smolvla", dtype="float32")
TIMES = np.array([0.25, 0.625, 0.9375], np.float32)  # LeRobot's, from actions (0) to noise (1); exact in float32
PADDING = np.arange(6) >= np.array([[6], [4], [1]])


@pytest.fixture(scope="module")
def side(tmp_path_factory: pytest.TempPathFactory):
    with conftest.side("external_side.py", tmp_path_factory.mktemp("smolvla") / "log") as ask:
        yield ask


@pytest.fixture(scope="module")
def seen() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    images = {name: rng.integers(0, 256, (3, 48, 64, 3), dtype=np.uint8) for name in CAMERAS}  # wide: it is padded
    return {**images, "state": rng.uniform(-1, 1, (3, 8)).astype(np.float32)}


@pytest.fixture(scope="module")
def saved(side, seen, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, np.ndarray]:
    """A checkpoint that LeRobot saved, and the actions that it selects."""
    folder = tmp_path_factory.mktemp("saved")
    facts = {"cameras": np.array(CAMERAS), "tasks": np.array(TASKS), "seeds": np.array(SEEDS)}
    np.savez(folder / "seen.npz", **facts, **seen)
    side("make", "smolvla", folder / "pretrained_model", folder / "seen.npz", folder / "answer.npy")
    return folder / "pretrained_model", np.load(folder / "answer.npy")


def observations(seen: dict[str, np.ndarray]) -> list[RobotObservation]:
    return [RobotObservation({n: seen[n][k] for n in CAMERAS}, seen["state"][k], TASKS[k]) for k in range(3)]


def test_actions_equal_select_action_also_after_saving(saved, seen, tmp_path):
    folder, expected = saved
    parts = load_parts(folder, SETTINGS.model_copy(update={"path": str(folder)}))
    save_policy(tmp_path / "checkpoint", parts, load_model(folder, parts).state_dict())
    policy = open_flow_policy(tmp_path, "continuous", rows=1)
    chunks = policy.predict(observations(seen), SEEDS)
    np.testing.assert_allclose(chunks, expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max())
    assert policy.predict(observations(seen)[1:2], SEEDS[1:2])[0].tobytes() == chunks[1].tobytes()
    assert {file.name for file in folder.iterdir()} <= {file.name for file in (tmp_path / "checkpoint").iterdir()}


@pytest.mark.parametrize("mode", ["expert", "full"])
def test_loss_and_gradient_norm_equal_lerobots(side, saved, seen, mode, tmp_path):
    folder, rng = saved[0], np.random.default_rng(1)
    actions, noise = rng.uniform(-1, 1, (3, 6, 7)).astype(np.float32), rng.normal(size=(3, 6, 32)).astype(np.float32)
    images = {name: seen[name] for name in CAMERAS}
    batch = {"observation.state": seen["state"], "action": actions, "action_is_pad": PADDING, **images}
    np.savez(tmp_path / "batch.npz", **batch, tasks=np.array(TASKS), noise=noise, time=TIMES)
    side("train", mode, folder, tmp_path / "batch.npz", tmp_path / "answer.npy")
    loss, norm = np.load(tmp_path / "answer.npy")

    settings = VLATrainerSettings(
        max_steps=1, batch_size=3, micro_batch_size=3, mode=mode, freeze_embedding=mode == "expert"
    )
    parts, kind = load_parts(folder, SETTINGS.model_copy(update={"path": str(folder)})), family("smolvla")
    model, processor = load_model(folder, parts), parts.processor()
    prepare(model, settings, "head")
    learner = PolicyLearner(model, settings, kind.loss_plan(SETTINGS))
    examples = [processor.encode(each, *rows) for each, *rows in zip(observations(seen), actions, PADDING, strict=True)]
    micros = []  # two micro-batches, whose losses add up to the update's loss
    for rows in ([0, 1], [2]):
        draws = FlowSamples(torch.from_numpy(1 - TIMES[rows, None]), torch.from_numpy(noise[rows, None]))
        micros.append(PolicyMicroBatch(processor.batch([examples[row] for row in rows]), draws, 1))
    report = learner.step(micros)
    np.testing.assert_allclose([report["loss"], report["grad_norm"]], [loss, norm], rtol=1e-5)
