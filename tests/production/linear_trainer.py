"""A trainer as another package adds one, and a training with it: `python -m ... FOLDER MACHINE`, the latter as JSON.

The model is linear: service, ranks, checkpoints and nodes are those of every training, and start quickly.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
from pydantic import BaseModel
from safetensors.torch import save_file

from armature.components.contracts.machine import Machine
from armature.components.contracts.stages import Artifact
from armature.components.training.client import ServiceClient, run_steps
from armature.components.training.engine import ParameterGroup, TrainingEngine
from armature.components.training.ranks import Ranks
from armature.components.training.service_settings import ServiceSettings
from armature.components.training.service_worker import Command, ServiceWorker

STEPS, SAVED_EVERY, PAUSED_AFTER = 40, 10, 15
CONTINUE, PAUSED, OUT, WEIGHTS = "continue", "paused", "out", "model.safetensors"


def installed(folder: Path) -> str:
    """Make a package in `folder` whose entry point adds the trainer `linear`. Return the PYTHONPATH with which programs
    have it."""
    package = folder / "linear_trainer-0.1.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: linear-trainer\nVersion: 0.1\n")
    points = "[armature.trainers]\nlinear = tests.production.linear_trainer:LinearWorker\n"
    (package / "entry_points.txt").write_text(points)
    return f"{Path(__file__).parents[2]}:{folder}"


class LinearTraining(BaseModel):
    WORKER: ClassVar[str] = "linear"
    seed: int = 0


class LinearWorker(ServiceWorker):
    """A trainer of a linear layer that learns to reverse random vectors. Each rank draws different vectors."""

    def __init__(self, settings: ServiceSettings, ranks: Ranks) -> None:
        model = torch.nn.Linear(8, 8)
        group = ParameterGroup("all", list(model.parameters()), lambda step: 1e-2, 0.0)
        self.learner = TrainingEngine(
            model, [group], ranks, sharded=False, betas=(0.9, 0.95), eps=1e-8, max_grad_norm=1.0
        )
        super().__init__(settings, self.learner, {}, keep=2, remembered=STEPS)

    def prepare(self, command: Command) -> None: ...

    def train(self, command: Command, prepared: None) -> dict[str, float]:
        random = torch.Generator().manual_seed(self.ranks.size * command["step"] + self.ranks.rank)
        vectors = torch.randn(4, 8, generator=random)
        loss = (self.learner.model(vectors) - vectors.flip(1)).square().mean()
        self.learner.backward(loss)
        self.learner.update(command["step"])
        self.learner.steps_done += 1
        return {"loss": loss.item()}

    def perform(self, command: Command, prepared: None) -> None:
        if self.ranks.first:
            folder = Path(command["folder"])
            folder.mkdir(exist_ok=True)
            save_file(self.learner.model.state_dict(), folder / WEIGHTS)
        self.ranks.broadcast(None)


class Printed:
    """An implementation of `Events` that prints messages and ignores all else."""

    def progress(self, name: str, done: int, total: int, **postfix: float) -> None: ...

    def metrics(self, values: Mapping[str, float], step: int) -> None: ...

    def artifact(self, artifact: Artifact, role: str, step: int | None = None) -> None: ...

    def message(self, text: str) -> None:
        print(text, flush=True)


class LinearClient(ServiceClient):
    def step(self, step: int) -> None:
        self._train(step)


def train(folder: Path, machine: Machine) -> None:
    """Run the training. After step `PAUSED_AFTER` it pauses until the file `CONTINUE` exists, so that a test can cause
    a fault then."""
    with LinearClient(LinearTraining(), machine, folder / "trainer") as trainer:

        def one_step(step: int) -> Any:
            while step > PAUSED_AFTER and not (folder / CONTINUE).exists():
                (folder / PAUSED).touch()
                time.sleep(0.05)
            trainer.step(step)
            if step % SAVED_EVERY == 0:
                trainer.save()

        run_steps(trainer, STEPS, lambda: None, one_step, folder / OUT, Printed())


if __name__ == "__main__":
    train(Path(sys.argv[1]), Machine.model_validate(json.loads(sys.argv[2])))
