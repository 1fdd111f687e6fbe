"""examples/train_policy.py learns its task, and makes the policy of the stages, bit for bit."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

from armature import PolicyTrainer
from armature.components.configuration.stages import run_stage
from armature.components.contracts.stages import Artifact
from armature.components.robots.datasets.settings import DatasetSettings, QuantileStatsSettings
from armature.components.robots.imitation.settings import TrainVLASettings
from tests.builders import make_machine

EXAMPLE = runpy.run_path(str(Path(__file__).resolve().parents[2] / "examples/train_policy.py"))
POLICY, TRAINING, record = (EXAMPLE[name] for name in ("POLICY", "TRAINING", "record"))


@pytest.mark.slow
def test_policy_uses_the_image(tmp_path: Path) -> None:
    record(tmp_path / "dataset", episodes=40)
    trainer = PolicyTrainer(tmp_path / "dataset", POLICY, TRAINING.model_copy(update={"max_steps": 60}), tmp_path)
    metrics = trainer.train()
    assert metrics["heldout/action_error"] < 0.4 * metrics["heldout/mean_action_error"]


@pytest.mark.slow
def test_policy_trainer_equals_the_stages(tmp_path: Path) -> None:
    dataset, machine = tmp_path / "dataset", make_machine(store=tmp_path / "store", threads=1, loader_workers=0)
    training = TRAINING.model_copy(update={"max_steps": 3, "warmup_steps": 1})
    record(dataset, episodes=10)
    trainer = PolicyTrainer(dataset, POLICY, training, tmp_path)
    metrics = trainer.train()
    trainer.save(tmp_path / "checkpoint")

    def made(stage: str, settings: Any, **inputs: Artifact) -> Artifact:
        return run_stage(stage, settings, inputs, machine)

    data, policy = made("dataset", DatasetSettings(path=str(dataset))), made("policy", POLICY)
    statistics = made("quantile-stats", QuantileStatsSettings(features=("observation.state", "action")), dataset=data)
    settings = TrainVLASettings(policy=POLICY, training=training)
    trained = made("train-vla", settings, policy=policy, dataset=data, statistics=statistics)
    names = sorted(path.name for path in (trained.path / "checkpoint").iterdir() if path.is_file())
    assert names == sorted(path.name for path in (tmp_path / "checkpoint").iterdir() if path.is_file())
    for name in names:
        assert (tmp_path / "checkpoint" / name).read_bytes() == (trained.path / "checkpoint" / name).read_bytes(), name
    history = (trained.path / "metrics.json").read_text()
    assert str(metrics["heldout/action_error"]) in history
