"""The complete warm-start stage: demonstrations of a real environment, a real trainer service, and its checkpoint."""

from __future__ import annotations

import json
from typing import Any

import pytest

from armature.components.artifacts.manifest import open_artifact, read_manifest
from armature.components.configuration import CONFIGS, read_toml
from armature.components.configuration.stages import open_store, run_stage
from armature.components.environments.settings import EnvironmentSettings
from armature.components.models.settings import ModelSettings
from armature.components.models.source import locate
from armature.components.rollouts.table import read_rollouts
from armature.components.vlm.settings import WarmStartStageSettings
from tests.builders import make_machine

VALUES: dict[str, Any] = {
    "demonstrations": 64,
    "heldout_demonstrations": 16,
    "max_sequence_tokens": 512,
    "epochs": 2,
    "samples_per_step": 16,
    "learning_rate": 3e-3,
    "max_tokens_per_micro_batch": 4096,
    "save_every": 4,
    "keep_checkpoints": 1,
}


@pytest.mark.slow
def test_warm_start_stage_lowers_heldout_loss(tmp_path):
    values = read_toml(CONFIGS / "train-vlm/colors.toml")
    del values["model"]["tiny"]["format"]  # with it the model could answer before any demonstration
    environment = EnvironmentSettings.model_validate(values["environment"])
    model_settings = ModelSettings.model_validate(values["model"])
    machine = make_machine(store=tmp_path / "store", threads=1)
    tasks = run_stage("tasks", environment, {}, machine)
    model = run_stage("model", model_settings, {}, machine)
    settings = WarmStartStageSettings.model_validate({"model": values["model"], "warm_start": VALUES})
    made = run_stage("warm-start", settings, {"tasks": tasks, "model": model}, machine)

    manifest = read_manifest(open_artifact(made.path, "warm-start").path)
    assert manifest.rows == {"demonstrations": 80, "samples": 64, "steps": 8} and not manifest.drops
    numbers = json.loads((made.path / "metrics.json").read_text())
    history = json.loads((made.path / "history.json").read_text())
    assert [row["step"] for row in history] == list(range(9))
    assert [row["step"] for row in history if "heldout/loss" in row] == [0, 4, 8]
    assert numbers["heldout_token_accuracy"] > numbers["heldout_token_accuracy_before"]
    assert numbers["heldout_loss"] < 0.9 * numbers["heldout_loss_before"]
    assert locate(made.path) == made.path / "checkpoint"

    ((played,),) = [[each for each in open_store(machine) if each.kind == "demonstrations"]]
    assert json.loads((made.path / "lineage.json").read_text()) == [{"demonstrations": played.digest, "step": 0}]
    assert {turn.completion for t in read_rollouts(played.path).trajectories for turn in t.turns} <= set(
        environment.args["colors"]
    )
    assert '"trajectories":[{"id":' in (made.path / "report.html").read_text()
    assert run_stage("warm-start", settings, {"tasks": tasks, "model": model}, machine).digest == made.digest
