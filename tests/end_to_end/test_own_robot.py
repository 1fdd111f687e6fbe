"""The recipe train-vla/own-robot, shortened: another robot than LIBERO's is trained on and measured."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from armature.components.robots.datasets.lerobot.layout import Feature
from armature.components.robots.datasets.lerobot.writer import create_dataset
from armature.components.robots.datasets.settings import LayoutSettings

JOINTS = ["pan", "lift", "elbow", "wrist", "roll", "gripper"]
TINY = """{ hidden_size = 32, intermediate_size = 48, heads = 2, vision_hidden_size = 16, vision_intermediate_size = 24,
vision_heads = 2, image_side = 28, expert_hidden_size = 32, expert_heads = 2, initializer_range = 0.05,
corpus = ["pick up the cube", "single arm on a table", "absolute joint positions"] }"""
SHORT = {
    "policy.checkpoint_path": "",
    "policy.revision": "",
    "policy.tiny": TINY.replace("\n", " "),
    "policy.chunk_size": "4",
    "policy.n_action_steps": "4",
    "policy.num_inference_steps": "2",
    "policy.dtype": '"float32"',
    "training.mode": '"full"',
    "training.lora": "",
    "training.freeze_embedding": "false",
    "training.learning_rates": "{ vlm = 1e-3, vit = 1e-3, connector = 1e-3, action_expert = 1e-3 }",
    "training.max_steps": "30",
    "training.warmup_steps": "0",
    "training.batch_size": "4",
    "training.micro_batch_size": "4",
    "training.augmentation": "",
    "training.heldout": "{ fraction = 0.25, frames = 8, every = 30 }",
    "machine.trainer.gpus": "[]",
    "machine.trainer.loader_workers": "0",
}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A project with a dataset of eight episodes. Each action is the robot's next joint positions. The robot moves to a
    corner and back."""
    root = tmp_path_factory.mktemp("own-robot")
    features = {
        "observation.state": Feature(dtype="float32", shape=(6,), names=JOINTS),
        "action": Feature(dtype="float32", shape=(6,), names=JOINTS),
        "observation.images.top": Feature(dtype="image", shape=(32, 32, 3), names=["height", "width", "channel"]),
    }
    random = np.random.default_rng(0)
    layout = LayoutSettings()
    with create_dataset(root / "data", fps=10.0, robot_type="so101", features=features, layout=layout) as writer:
        for _ in range(8):
            path = np.linspace(0, np.pi, 11)[:, None] * random.uniform(0.5, 1.5, 6)
            joints = np.sin(path).astype(np.float32)
            images = random.integers(0, 255, (10, 32, 32, 3), dtype=np.uint8)
            frames = {"observation.state": joints[:-1], "action": joints[1:], "observation.images.top": images}
            writer.add_episode(frames, "pick up the cube")
    return root


def run(folder: Path, *more: str) -> subprocess.CompletedProcess[str]:
    overrides = [f"--set={key}={value}" for key, value in SHORT.items()]
    command = [sys.executable, "-m", "armature", "run", "train-vla/own-robot", "--set=dataset.path=data"]
    return subprocess.run([*command, *overrides, *more], cwd=folder, capture_output=True, text=True)


def test_own_robot_is_trained_and_measured(folder):
    done = run(folder)
    assert done.returncode == 0, done.stderr
    (metrics,) = (folder / ".armature/store/train-vla").glob("*/metrics.json")
    numbers = json.loads(metrics.read_text())
    assert numbers["heldout_loss"] < numbers["heldout_loss_before"]
    assert f"action_error={round(numbers['action_error'], 4)}" in done.stdout
    promoted = numbers["action_error"] <= numbers["mean_action_error"]  # thirty updates may be too few
    assert ("models:/train-vla.own-robot@candidate" in done.stdout) == promoted
    assert ("candidate        stays where it is" in done.stdout) != promoted
    assert not (folder / ".armature/store/evaluate-libero").exists()


def test_rejects_libero_evaluation_of_another_robot_before_training(folder):
    refused = run(folder, "--set=simulator={}", "--set=evaluation={}", "--set=training.seed=1")
    assert refused.returncode == 2
    assert "the dataset's actions have the shape [6], LIBERO's robot needs [7]" in refused.stderr
    assert "leave out the sections evaluation and simulator" in refused.stderr
    assert len(list((folder / ".armature/store/train-vla").glob("*/metrics.json"))) == 1
