"""Runs of some steps with a trainer in this process: what they leave behind, and that a stop changes none of it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from components.artifacts.images import ImageStore
from components.contracts.machine import Machine
from components.contracts.stages import Artifact, StageContext, not_sent
from components.environments.libero.settings import SimulatorSettings
from components.policies.molmoact2.policy import open_policy
from components.stages import TerminalEvents, ThreadUnits, open_store
from components.training.ranks import Ranks
from components.training.service_settings import service_settings
from components.vla_rl.client import RobotRLTrainerClient, RobotRLTraining
from components.vla_rl.collect import Collector
from components.vla_rl.run import RobotRLRun
from components.vla_rl.settings import RobotPreflightSettings, RobotRLTrainerSettings, TrainVLARLSettings
from components.vla_rl.stage import summary
from components.vla_rl.worker import RobotRLWorker
from components.workers.errors import WorkerError
from tests.evaluation.libero.playground import TASKS
from tests.vla_rl.kitchen import Kitchen, calm_policy, rollout_settings

SETTINGS = TrainVLARLSettings(
    simulator=SimulatorSettings(),
    rollouts=rollout_settings(batch=4, max_steps=6, noise_level=1.0),
    trainer=RobotRLTrainerSettings.model_validate(
        {"max_steps": 3, "micro_batch_size": 8, "learning_rates": {"action_expert": 1e-3}, "samples_per_update": 8}
    ),
    preflight=RobotPreflightSettings(),
)


class InProcessTrainer(RobotRLTrainerClient):
    alive = True  # type: ignore[assignment]

    def __init__(self, training: RobotRLTraining, machine: Machine, folder: Path) -> None:
        self.machine, self._saved = machine, not_sent
        self._worker = RobotRLWorker(service_settings(training, machine, folder), Ranks())

    def finish(self) -> None:
        self.settle()

    def _ask(self, name: str, timeout: float, **arguments: Any) -> Any:
        command = {"name": name, **arguments}
        known = self._worker.recorded(command)
        return self._worker.run(command, self._worker.check(command)) if known is None else known


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    folder = tmp_path_factory.mktemp("start")
    calm_policy(folder)
    return Artifact(kind="policy", path=folder, digest="0")


def train(folder: Path, start: Artifact, arenas: Sequence[Kitchen]) -> RobotRLRun:
    machine = Machine(store=str(folder / "store"))
    store = open_store(machine)
    context = StageContext(machine, TerminalEvents(), ThreadUnits(), folder / "work", store.images, "f")
    context.workspace.mkdir(parents=True, exist_ok=True)
    training = RobotRLTraining(
        trainer=SETTINGS.trainer, noise_level=1.0, policy=start.path, images=store.images, fingerprint="f"
    )
    policy = open_policy(start.path, "continuous", rows=1)
    collector = Collector(SETTINGS.rollouts, policy, arenas, ImageStore(store.images), lambda done, total: None)
    trainer = InProcessTrainer(training, machine, context.workspace / "trainer")
    run = RobotRLRun(SETTINGS, context, store, policy, TASKS, collector, trainer, start)
    run.train_all()
    run.finish(folder / "checkpoint")
    return run


def rows(run: RobotRLRun) -> list[dict[str, float]]:
    """The history without what depends on the machine."""
    timed = ("timing/", "memory/", "answers_per_second")
    return [{k: v for k, v in row.items() if not k.startswith(timed)} for row in run.history.read()]


def test_a_run_that_was_stopped_is_one_that_was_not(tmp_path: Path, start: Artifact) -> None:
    whole = train(tmp_path / "whole", start, [Kitchen()])
    history = whole.history.read()
    assert [row["step"] for row in history] == [1, 2, 3]
    assert sum(row["updates"] for row in history) > 1 and history[0]["rollouts/planned"] == 8
    assert summary(history)["reward"] == history[-1]["reward"]

    class Doomed(Kitchen):
        """Its process never comes back after the 15th chunk."""

        def __init__(self) -> None:
            super().__init__(range(15, 10_000))

    with pytest.raises(WorkerError, match="could not be played"):
        train(tmp_path / "stopped", start, [Doomed(), Doomed()])
    resumed = train(tmp_path / "stopped", start, [Kitchen(), Kitchen()])
    assert rows(resumed) == rows(whole) and resumed.lineage() == whole.lineage()
    weights = [load_file(tmp_path / name / "checkpoint/model.safetensors") for name in ("whole", "stopped")]
    assert all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())
    before = load_file(start.path / "checkpoint/model.safetensors")
    changed = {name for name, value in before.items() if not torch.equal(value, weights[0][name])}
    assert changed and all("action_expert" in name for name in changed)
