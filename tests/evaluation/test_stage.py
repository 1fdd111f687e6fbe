"""The evaluation stage with a real server, its environment arguments and its checkpoints."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from armature.components.artifacts.images import ImageStore
from armature.components.artifacts.manifest import open_artifact
from armature.components.artifacts.tables import read_table
from armature.components.configuration.stages import TerminalEvents, ThreadUnits, run_stage
from armature.components.contracts.machine import Machine
from armature.components.contracts.stages import Artifact, StageContext
from armature.components.environments.settings import EnvironmentSettings
from armature.components.environments.stage import load_tasks
from armature.components.evaluation.results import RESULTS, RESULTS_FILE
from armature.components.evaluation.settings import EvaluateStageSettings
from armature.components.evaluation.stage import checkpoint_folder, play
from armature.components.rollouts.table import read_rollouts
from tests.builders import make_machine
from tests.evaluation.test_results import COLORS, INFERENCE, VALUES
from tests.inference.conftest import write_checkpoint
from tests.inference.stand_in import run_stand_in
from tests.refusals import refused


@pytest.fixture
def machine(tmp_path) -> Machine:
    return make_machine(store=tmp_path / "store", threads=1)


@pytest.fixture
def tasks(machine) -> Artifact:
    settings = EnvironmentSettings.model_validate(COLORS | {"train_tasks": 4, "heldout_tasks": 10})
    return run_stage("tasks", settings, {}, machine)


@pytest.mark.slow
def test_every_task_is_played_once(machine, tasks, shared_server, joined_url):
    model = Artifact(kind="model", path=shared_server.checkpoint, digest="0")
    machine = make_machine(machine, endpoints=(joined_url,))
    settings = EvaluateStageSettings.model_validate({"evaluation": VALUES | {"max_tasks": 8}, "inference": INFERENCE})
    made = run_stage("evaluate", settings, {"tasks": tasks, "model": model}, machine)
    open_artifact(made.path, "evaluate")
    numbers = json.loads((made.path / "metrics.json").read_text())
    rows = read_table(made.path / RESULTS_FILE, RESULTS).to_pylist()
    assert (numbers["tasks"], numbers["episodes"], numbers["failed"]) == (8, 8, 0)
    assert len({row["task_id"] for row in rows}) == 8
    assert numbers["accuracy_low"] <= numbers["accuracy"] <= numbers["accuracy_high"]
    assert {t.task_id for t in read_rollouts(made.path).trajectories} == {row["task_id"] for row in rows}
    page = (made.path / "report.html").read_text()
    assert all(row["task_id"] in page for row in rows) and page.count("data:image/png;base64,") == 8
    assert "accuracy, 95 % interval" in page


def test_rejects_folder_without_checkpoint(tmp_path):
    with refused("not_a_checkpoint", tmp_path):
        checkpoint_folder(Artifact(kind="model", path=tmp_path, digest="0"))


def test_checkpoint_of_a_training_run_is_found(tmp_path):
    (tmp_path / "checkpoint").mkdir()
    (tmp_path / "checkpoint/config.json").write_text("{}")
    assert checkpoint_folder(Artifact(kind="train-vlm", path=tmp_path, digest="0")) == tmp_path / "checkpoint"


def test_evaluation_args_change_the_prompt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "key")
    environment = COLORS | {"train_tasks": 2, "heldout_tasks": 3, "evaluation_args": {"question": "Which one?"}}
    described = EnvironmentSettings.model_validate(environment)
    settings = EvaluateStageSettings.model_validate({"evaluation": VALUES, "inference": INFERENCE})
    with run_stand_in("key") as server:
        machine = make_machine(store=tmp_path / "store", endpoints=(server.url,), ready_timeout=5.0)
        tasks = run_stage("tasks", described, {}, machine)
        context = StageContext(machine, TerminalEvents(), ThreadUnits(), tmp_path, tmp_path / "images", "key")
        checkpoint, images = write_checkpoint(tmp_path / "checkpoint"), ImageStore(tmp_path / "images")
        listed = load_tasks(tasks.path, "heldout")
        played = asyncio.run(play(settings, listed, tasks.path, checkpoint, images, context))
    assert len(played.trajectories) == 3
    asked = [part["text"] for body in server.bodies for part in body["messages"][-1]["content"] if "text" in part]
    assert asked == ["Which one?"] * 3
