"""Somebody has a robot and episodes of it: a policy is trained on them, measured, served, and asked for actions."""

from __future__ import annotations

import ast
import re
import shutil

import numpy as np
import pytest

from armature.components.robots.datasets.lerobot.layout import Feature
from armature.components.robots.datasets.lerobot.writer import create_dataset
from armature.components.robots.datasets.settings import LayoutSettings
from armature.services import free_port
from tests.first_hour.conftest import ROOT, Newcomer

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(600)]

JOINTS = ["pan", "lift", "elbow", "gripper"]
GOALS = np.array([[-0.8, 0.5, -0.3, 0.9], [0.8, -0.4, 0.6, -0.9]])
"""Joint positions of the two goals; the camera shows which one to reach."""
CAMERA, STEPS = "observation.images.top", 16
WITHOUT_LIBERO = """
flow = "train-vla"
extends = { file = "train-vla/tiny", without = ["demonstrations", "layout", "evaluation", "simulater"] }
dataset.path = "episodes"
"""
RECIPE = """
flow = "train-vla"
extends = "train-vla/own-robot-tiny"

[policy]
setup_type = "single so101 arm on a desk"
control_mode = "absolute joint positions"

[dataset]
path = "episodes"

[training]
max_steps = 100
"""
CLIENT = """
import sys
import numpy as np
import robot_client

half = int(sys.argv[2]) * 24
image = np.full((48, 48, 3), 40, "uint8")
image[:, half : half + 24, 0] = 230
joints = np.array(sys.argv[3:], "float32")
seen = {"observation.images.top": image, "observation.state": joints}
robot_client.observe = lambda fields, task: {**seen, "prompt": task}
robot_client.main(sys.argv[1], "reach for the red half", chunks=4)
"""


def record(folder) -> None:
    """Record 48 episodes of a robot that moves from a random position to the goal on the red side of its image."""
    features = {
        "observation.state": Feature(dtype="float32", shape=(4,), names=JOINTS),
        "action": Feature(dtype="float32", shape=(4,), names=JOINTS),
        CAMERA: Feature(dtype="image", shape=(48, 48, 3), names=["height", "width", "channel"]),
    }
    random = np.random.default_rng(0)
    with create_dataset(folder, fps=10.0, robot_type="so101", features=features, layout=LayoutSettings()) as writer:
        for episode in range(48):
            side, states = episode % 2, [random.uniform(-1, 1, 4)]
            for _ in range(STEPS):
                states.append(states[-1] + np.clip(GOALS[side] - states[-1], -0.15, 0.15))
            images = random.integers(40, 48, (STEPS, 48, 48, 3), dtype=np.uint8)
            images[:, :, 24 * side : 24 * side + 24, 0] = 230
            joints = np.array(states, np.float32)
            frames = {"observation.state": joints[:-1], "action": joints[1:], CAMERA: images}
            writer.add_episode(frames, "reach for the red half")


def test_robot_owner_trains_measures_and_serves_a_policy(newcomer: Newcomer) -> None:
    newcomer.variables["CUDA_VISIBLE_DEVICES"] = ""
    record(newcomer.folder / "episodes")

    newcomer.writes("without.toml", WITHOUT_LIBERO)
    misspelled = newcomer.types("check", "without.toml", "--configuration-only", code=2).text
    assert "code: not_inherited" in misspelled and "did you mean 'simulator'?" in misspelled
    newcomer.writes("without.toml", WITHOUT_LIBERO.replace("simulater", "simulator"))
    newcomer.types("check", "without.toml", "--configuration-only")
    newcomer.writes("my-robot.toml", RECIPE)
    released = ("--set", "policy.checkpoint_path=allenai/MolmoAct2")
    assert (
        "policy_ambiguous" in newcomer.types("check", "my-robot.toml", "--configuration-only", *released, code=2).text
    )

    # One update of a policy with random weights does not make it better than the mean action.
    short = [f"--set=training.{name}" for name in ("max_steps=1", "warmup_steps=0", "seed=1")]
    worse = newcomer.types("run", "my-robot.toml", *short).text
    refused = re.search(r"^candidate +stays .* action_error (\S+) after training, (\S+) of the", worse, re.MULTILINE)
    assert refused is not None and float(refused[1]) > float(refused[2])
    policy = "models:/train-vla.my-robot@candidate"
    assert "code: unknown_model" in newcomer.types("serve-policy", policy, code=1).text

    trained = newcomer.types("run", "my-robot.toml").text
    assert re.search(rf"^candidate +{policy}$", trained, re.MULTILINE)
    measured = re.search(r"^action_error +(\S+) → (\S+), (\S+) of the mean action$", trained, re.MULTILINE)
    assert measured is not None
    before, after, constant = map(float, measured.groups())
    assert after < constant / 2 < before

    shutil.copy(ROOT / "examples/robot_client.py", newcomer.folder)
    newcomer.writes("ask.py", CLIENT)
    newcomer.variables["ARMATURE_POLICY_KEY"] = "a-key-of-the-desk"
    server = newcomer.starts("serve-policy", policy, "--port", str(free_port()))
    url = server.wait_for(r"serving at (ws://[\w.:]+)")[1]
    for side, goal in enumerate(GOALS):  # a robot at its goal stays there
        printed = newcomer.types("ask.py", url, str(side), *map(str, goal)).lines
        actions = np.array([ast.literal_eval(line) for line in printed if line])
        assert actions.shape == (4 * 8, 4)
        here, there = np.abs(actions.mean(0) - goal).mean(), np.abs(actions.mean(0) - GOALS[1 - side]).mean()
        assert here < there / 2
    server.interrupt()
    assert server.end() == 0
