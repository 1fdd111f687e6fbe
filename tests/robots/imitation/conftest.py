"""A tiny policy, a small dataset whose actions are functions of its states, and its statistics."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from armature.components.artifacts.json_lines import History
from armature.components.contracts.machine import Machine
from armature.components.contracts.stages import Artifact
from armature.components.robots.datasets.lerobot.layout import Feature
from armature.components.robots.datasets.lerobot.writer import LayoutSettings, create_dataset
from armature.components.robots.imitation.settings import TrainVLASettings
from armature.components.robots.imitation.train import PolicyTraining, train
from armature.components.robots.imitation.worker import PolicyWorker
from armature.components.robots.policies.settings import RobotPolicySettings
from armature.components.training.ranks import Ranks
from armature.components.training.service_settings import ServiceSettings, service_settings
from tests.builders import make_machine
from tests.robots.policies import plain

from .settings import training_settings

CHUNK, FPS = 3, 10.0
LAYOUT = LayoutSettings(chunks_size=1000, data_files_size_in_mb=100.0, video_files_size_in_mb=200.0)

TINY: dict[str, Any] = {
    "seed": 0,
    "hidden_size": 32,
    "intermediate_size": 48,
    "layers": 2,
    "heads": 2,
    "key_value_heads": 1,
    "vision_hidden_size": 16,
    "vision_intermediate_size": 24,
    "vision_layers": 2,
    "vision_heads": 2,
    "image_side": 28,
    "expert_hidden_size": 32,
    "expert_heads": 2,
    "expert_mlp_ratio": 2.0,
    "time_embedding": 16,
    "max_action_dim": 4,
    "max_action_horizon": CHUNK,
    "max_positions": 512,
    "action_tokens": 64,
    "corpus": ("move the arm to the block", "close the gripper"),
    "initializer_range": 0.05,
    "vision_initializer_range": 0.05,
}
POLICY: dict[str, Any] = {
    "tiny": TINY,
    "chunk_size": CHUNK,
    "n_action_steps": CHUNK,
    "setup_type": "an arm",
    "control_mode": "velocities",
    "num_inference_steps": 2,
}


def policy_settings(**changes: Any) -> RobotPolicySettings:
    return plain.policy_settings(**(POLICY | changes))


def write_dataset(root: Path, episodes: int, seed: int = 0, layout: LayoutSettings = LAYOUT) -> None:
    """Write a dataset with two actions and a gripper, all functions of the state, which is a random walk."""
    features = {
        "observation.state": Feature(dtype="float32", shape=(2,), names=["x", "y"]),
        "action": Feature(dtype="float32", shape=(3,), names=["dx", "dy", "gripper"]),
        "observation.images.front": Feature(dtype="image", shape=(32, 32, 3), names=["height", "width", "channel"]),
    }
    random = np.random.default_rng(seed)
    with create_dataset(root, fps=FPS, robot_type="arm", features=features, layout=layout) as writer:
        for number in range(episodes):
            length = 6 + number % 3
            state = np.cumsum(random.normal(0, 0.3, (length, 2)), 0).astype(np.float32)
            gripper = np.where(state[:, :1] > 0, 1.0, -1.0)
            frames = {
                "observation.state": state,
                "action": np.concatenate([-state, gripper], 1).astype(np.float32),
                "observation.images.front": random.integers(0, 255, (length, 32, 32, 3), dtype=np.uint8),
            }
            writer.add_episode(frames, ("move the arm to the block", "close the gripper now")[number % 2])


@pytest.fixture(scope="session")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return the artifacts of the preceding stages, by the name under which the stage takes them as input."""
    from armature.components.robots.policies.molmoact2.checkpoints.tiny import make_tiny_policy

    root = tmp_path_factory.mktemp("vla")
    write_dataset(root / "data" / "dataset", 6)
    (root / "statistics").mkdir()
    shutil.copyfile(root / "data/dataset/meta/stats.json", root / "statistics/stats.json")
    make_tiny_policy(root / "policy" / "checkpoint", policy_settings())
    return {"policy": root / "policy", "dataset": root / "data", "statistics": root / "statistics"}


@dataclass(frozen=True)
class Job:
    """A training that runs in this process, for tests that need no trainer service."""

    training: PolicyTraining
    service: ServiceSettings
    folder: Path

    @property
    def history(self) -> Path:
        return self.folder / "history.jsonl"

    @property
    def checkpoint(self) -> Path:
        return self.folder / "checkpoint"

    def train(self, ranks: Ranks | None = None) -> None:
        """Train to the end. All ranks call this method; the first one writes the history."""
        ranks = ranks or Ranks()
        worker = PolicyWorker(self.service, ranks)
        trainer: Any = WorkerClient(worker)
        history = History(self.history if ranks.first else self.folder / "none")
        train(trainer, self.training.settings.training, history, Silent(), self.checkpoint)


class WorkerClient:
    """A client of a trainer's worker that runs in this process. It calls the worker directly."""

    alive = True

    def __init__(self, worker: PolicyWorker) -> None:
        self.worker = worker

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return partial(self._ask, {"finish": "settle"}.get(name, name))

    def _ask(self, name: str, *values: Any) -> Any:
        parameters = {"step": ("step",), "publish": ("folder", "version")}.get(name, ())
        command = {"name": name} | dict(zip(parameters, values, strict=True))
        return self.worker.run(command, self.worker.check(command))


class Silent:
    """An implementation of `Events` that ignores all events."""

    def progress(self, name: str, done: int, total: int, **postfix: float) -> None: ...
    def metrics(self, values: Mapping[str, float], step: int) -> None: ...
    def artifact(self, artifact: Artifact, role: str, step: int | None = None) -> None: ...
    def message(self, text: str) -> None: ...


def make_job(
    inputs: dict[str, Path],
    folder: Path,
    policy: dict[str, Any] | None = None,
    machine: Machine | None = None,
    **training: Any,
) -> Job:
    settings = TrainVLASettings(policy=policy_settings(**(policy or {})), training=training_settings(**training))
    training_of = PolicyTraining(settings=settings, **inputs, fingerprint="test")
    machine = machine or make_machine(threads=1, loader_workers=0, ready_timeout=120)
    service = service_settings(training_of, machine, folder / "trainer")
    folder.mkdir(parents=True, exist_ok=True)
    return Job(training_of, service, folder)
