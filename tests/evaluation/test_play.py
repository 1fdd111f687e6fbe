"""How an evaluation plays: by the arguments that the environment has for evaluations."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from armature.components.artifacts.images import ImageStore
from armature.components.contracts.machine import Machine
from armature.components.contracts.stages import StageContext
from armature.components.environments.settings import EnvironmentSettings
from armature.components.environments.stage import load_tasks
from armature.components.evaluation.settings import EvaluateStageSettings
from armature.components.evaluation.stage import play
from armature.components.stages import TerminalEvents, ThreadUnits, run_stage
from tests.evaluation.test_results import COLORS, INFERENCE, VALUES
from tests.inference.conftest import write_checkpoint
from tests.inference.stand_in import run_stand_in


def test_an_evaluation_asks_as_its_own_arguments_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "key")
    environment = COLORS | {"train_tasks": 2, "heldout_tasks": 3, "evaluation_args": {"question": "Which one?"}}
    described = EnvironmentSettings.model_validate(environment)
    settings = EvaluateStageSettings.model_validate({"evaluation": VALUES, "inference": INFERENCE})
    with run_stand_in("key") as server:
        machine = Machine(store=str(tmp_path / "store"), endpoints=(server.url,), ready_timeout=5.0)
        tasks = run_stage("tasks", described, {}, machine)
        context = StageContext(machine, TerminalEvents(), ThreadUnits(), tmp_path, tmp_path / "images", "key")
        checkpoint, images = write_checkpoint(tmp_path / "checkpoint"), ImageStore(tmp_path / "images")
        listed = load_tasks(tasks.path, "heldout")
        played = asyncio.run(play(settings, listed, tasks.path, checkpoint, images, context))
    assert len(played.trajectories) == 3
    asked = [part["text"] for body in server.bodies for part in body["messages"][-1]["content"] if "text" in part]
    assert asked == ["Which one?"] * 3
