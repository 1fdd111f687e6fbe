"""Small stages with the shape of the real chain: tasks -> model -> train with units -> evaluate."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from armature.components.artifacts.disk import atomic_folder
from armature.components.artifacts.manifest import open_artifact, write_manifest
from armature.components.configuration.recipes import MachineSection, Sections
from armature.components.contracts.errors import DataError, ServerError
from armature.components.contracts.machine import Machine
from armature.components.contracts.stages import Artifact, Stage, StageReport


class TasksSettings(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)
    count: int


class TrainSettings(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)
    steps: int
    rate: float
    fail_once: str = ""  # a file that is made at the first failure
    hang_once: str = ""  # likewise
    refuse: bool = False


class EvaluateSettings(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)
    seed: int
    refuse_seeds: tuple[int, ...] = ()


class DemoRecipe(Sections):
    tasks: TasksSettings
    train: TrainSettings
    machine: MachineSection = Machine()
    evaluate: EvaluateSettings | None = None


def make_tasks(settings, inputs, folder, context):
    (folder / "tasks.json").write_text(json.dumps(list(range(settings.count))))
    return StageReport(rows={"tasks": settings.count})


def _step_artifact(kind: str, step: int, inputs: dict[str, Artifact], root: Path) -> Artifact:
    home = root / f"{kind}-{step}"
    if not home.exists():
        with atomic_folder(home) as folder:
            (folder / "data.txt").write_text(f"{kind} {step}")
            digests = {key: each.digest for key, each in inputs.items()}
            write_manifest(folder, kind=kind, kind_version=1, rows={"data": 1}, drops={}, inputs=digests, settings={})
    return open_artifact(home)


def train(settings, inputs, folder, context):
    if settings.refuse:
        raise DataError("the data is bad", code="bad_row", where="row 7", remedy="fix it")
    if settings.fail_once and not Path(settings.fail_once).exists():
        Path(settings.fail_once).touch()
        raise ServerError("the server died")
    if settings.hang_once and not Path(settings.hang_once).exists():
        Path(settings.hang_once).touch()
        time.sleep(3600)
    for step in range(settings.steps):
        rollouts = context.units.submit(
            f"rollouts-{step}", _step_artifact, "rollouts", step, {"tasks": inputs["tasks"]}, context.workspace
        ).result()
        context.events.artifact(rollouts, "output", step)
        batch = context.units.submit(
            f"batch-{step}", _step_artifact, "batch", step, {"rollouts": rollouts}, context.workspace
        ).result()
        context.events.artifact(batch, "output", step)
        loss = context.units.submit(f"step-{step}", lambda step=step: 1.0 / (1 + step)).result()
        context.units.submit(f"sync-{step}", time.sleep, 0.01).result()
        context.events.metrics({"loss": loss}, step)
        context.events.progress("train", step + 1, settings.steps, loss=loss)
    context.events.message(f"trained with {os.getpid()}")
    (folder / "weights.txt").write_text(f"{settings.steps} {settings.rate}")
    return StageReport(rows={"steps": settings.steps})


def evaluate(settings, inputs, folder, context):
    if settings.seed in settings.refuse_seeds:
        raise DataError(f"seed {settings.seed} is refused", where="evaluate", remedy="take another")
    weights = (inputs["model"].path / "weights.txt").read_text()
    value = (hash_number(weights) + settings.seed) % 100 / 100
    (folder / "metrics.json").write_text(json.dumps({"accuracy": value}))
    return StageReport(rows={"samples": 10})


def hash_number(text: str) -> int:
    return sum(map(ord, text))


TASKS = Stage("demo-tasks", 1, TasksSettings, (), make_tasks)
TRAIN = Stage("demo-train", 1, TrainSettings, ("tasks",), train)
EVALUATE = Stage("demo-evaluate", 1, EvaluateSettings, ("tasks", "model"), evaluate)
