"""DVC and a flow's stages agree: what one has made, the other does not make again, under the same digest.

Also in an experiment, which may run in a copy of the repository that is removed afterwards.
"""

from __future__ import annotations

import csv
import hashlib
import json
import re

import pytest
import yaml

from armature.components.configuration import load_recipe
from tests.end_to_end.conftest import ROOT, Project, make

SHORT = ["model.tiny.format.steps=2", "environment.train_tasks=16", "environment.heldout_tasks=16"]
SHORTER = """
[model.tiny.format]
steps = 2
"""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture
def project(tmp_path) -> Project:
    made = Project(tmp_path)
    recipe = tmp_path / "configs/train-vlm/colors.toml"
    text = recipe.read_text()
    for long, short in (("train_tasks = 4096", "train_tasks = 16"), ("heldout_tasks = 256", "heldout_tasks = 16")):
        assert long in text
        text = text.replace(long, short)
    recipe.write_text(text + SHORTER)
    return made


def test_second_dvc_repro_reuses_artifacts_of_flows(project):
    recipe = load_recipe("train-vlm/colors", [*SHORT, f'machine.store="{project.store}"'])
    by_flow = make(recipe, "model")

    first = project.dvc("repro", "tasks", "model")
    assert "tasks: made in" in first and "model: already made" in first
    assert project.locked_digest("model") == by_flow.digest

    by_flow = make(recipe, "tasks")
    assert project.locked_digest("tasks") == by_flow.digest
    assert "Running stage" not in project.dvc("repro", "tasks", "model")


def test_dvc_experiment_in_a_copy_links_its_artifacts(project):
    project.dvc("repro", "tasks")
    project.commit()
    changed = "configs/train-vlm/colors.toml:environment.heldout_tasks=8"
    output = project.dvc("exp", "run", "--temp", "--name", "fewer", "--set-param", changed, "tasks")
    assert "tasks: made in" in output
    rows = csv.DictReader(project.dvc("exp", "show", "--csv", "--rev", "HEAD").splitlines())
    assert sorted((row["Experiment"], row["environment.heldout_tasks"]) for row in rows) == [
        *[("", "16")] * 2,  # what is here, and what it began with
        ("fewer", "8"),
    ]
    stored = sorted((project.store / "tasks").glob("*/manifest.json"))
    assert len(stored) == 2 and list(project.folder.rglob(".armature")) == [project.folder / ".armature"]

    project.dvc("exp", "apply", "fewer", code=255)  # the other stages were never made, which it says
    assert json.loads((project.folder / "data/tasks/manifest.json").read_text())["rows"]["heldout"] == 8
    assert "Running stage" not in project.dvc("repro", "tasks")
    for file in (project.folder / "data/tasks").iterdir():
        assert any(file.samefile(each) for each in project.store.glob(f"tasks/*/{file.name}")), file


@pytest.mark.parametrize("file", ["dvc.yaml", "armature/init/template/dvc.yaml"])
def test_dvc_metrics_and_plots_are_real_files(file):
    """In a folder that the cache lacks, as in a fresh clone, they would stop `dvc exp run`."""
    pipeline = yaml.safe_load((ROOT / file).read_text())
    outs = {out for stage in pipeline["stages"].values() for out in stage["outs"]}
    metrics = {path for stage in pipeline["stages"].values() for each in stage.get("metrics", ()) for path in each}
    drawn = {path for plot in pipeline["plots"] for description in plot.values() for path in description["y"]}
    assert drawn and drawn <= outs and metrics and "metrics" not in pipeline
    assert not metrics & outs and all(path.endswith("-metrics.json") for path in metrics)


def test_dvc_lock_is_current_and_machine_independent():
    """Not of the code and the values that there are: making it again takes a quarter of an hour."""
    lock, text = yaml.safe_load((ROOT / "dvc.lock").read_text()), (ROOT / "dvc.lock").read_text()
    stages = yaml.safe_load((ROOT / "dvc.yaml").read_text())["stages"]
    assert {name: stage["cmd"] for name, stage in lock["stages"].items()} == {
        name: stage["cmd"] for name, stage in stages.items()
    }
    assert not re.search(r"(^|[\s'\"=])/\w|~/|file:", text)
    for name, stage in lock["stages"].items():
        for measured in stages[name].get("metrics", ()):
            (path,) = measured
            (out,) = [each for each in stage["outs"] if each["path"] == path]
            assert hashlib.md5((ROOT / path).read_bytes()).hexdigest() == out["md5"]


@pytest.mark.parametrize("stages", [("train-vlm", "evaluate"), ("train-vla", "evaluate-libero")])
def test_dvc_compares_at_most_ten_numbers_of_a_recipe(stages):
    rows = [key for stage in stages for key in json.loads((ROOT / f"data/{stage}-metrics.json").read_text())]
    assert {"accuracy", "success"} & set(rows) and len(rows) <= 10
