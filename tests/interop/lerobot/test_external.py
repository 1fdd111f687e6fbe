"""Policies that LeRobot computes in its own process: the actions of LeRobot's `select_action`, to the last bit."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import numpy as np
import pytest

from armature.components.contracts.robots import RobotObservation
from armature.components.robots.policies.lerobot.process import PYTHON, LeRobotPolicy
from armature.components.robots.policies.settings import LeRobotPolicySettings
from tests.robots.server.openpi import LIBERO

from . import conftest

CAMERAS = ("observation.images.image", "observation.images.wrist_image")
TASKS = ("put the bowl away", "open it", "put it away")
SEEDS = [5, 6, 2**40]


@pytest.fixture(scope="module")
def side(tmp_path_factory: pytest.TempPathFactory):
    with conftest.side("external_side.py", tmp_path_factory.mktemp("external") / "log") as ask:
        yield ask


@pytest.mark.parametrize(
    "kind", ["act", *(pytest.param(kind, marks=pytest.mark.long) for kind in ("diffusion", "smolvla"))]
)
def test_process_returns_the_actions_of_select_action(side, kind, tmp_path, monkeypatch):
    rng = np.random.default_rng(0)
    images = {name: rng.integers(0, 256, (3, 64, 64, 3), dtype=np.uint8) for name in CAMERAS}
    state = rng.uniform(-1, 1, (3, 8)).astype(np.float32)
    facts = {"cameras": np.array(CAMERAS), "state": state, "tasks": np.array(TASKS), "seeds": np.array(SEEDS)}
    np.savez(tmp_path / "seen.npz", **facts, **images)
    folder, answer = tmp_path / "pretrained_model", tmp_path / "answer.npy"
    side("make", kind, folder, tmp_path / "seen.npz", answer)
    seen = [RobotObservation({name: images[name][k] for name in CAMERAS}, state[k], TASKS[k]) for k in range(3)]

    monkeypatch.setenv(PYTHON, str(conftest.PYTHON))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    settings = LeRobotPolicySettings(path=str(folder), conventions=LIBERO)
    with LeRobotPolicy(settings, Path(folder), None, rows=3, threads=1) as policy:
        chunks = policy.predict(seen, SEEDS)
        np.testing.assert_array_equal(chunks, np.load(answer))
        assert np.ptp(chunks, axis=1).max() > 0.05 and np.abs(chunks[0] - chunks[1]).max() > 0.01
        np.testing.assert_array_equal(policy.predict(seen[1:2], SEEDS[1:2])[0], chunks[1])
        if kind == "act":  # a process that dies is started again, and answers the same
            assert policy.pid is not None
            os.kill(policy.pid, signal.SIGKILL)
            np.testing.assert_array_equal(policy.predict(seen[::-1], SEEDS[::-1]), chunks[::-1])
