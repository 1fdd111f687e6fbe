"""Recipes in any folder: their paths and modules begin there, and what lies there is part of what is made."""

from __future__ import annotations

import json
import shutil
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from armature.components.configuration import load_recipe, recipe_names
from armature.components.configuration.recipes import RECIPES
from armature.deployments import USE_PROJECT, deployment, flow_of

RECIPE = """\
flow = "train-vlm"
extends = "train-vlm/colors"
description = "Shapes of mine."

[environment]
name = "own_shapes:Shapes"
args = { words = "words/list.txt" }
train_tasks = 4
heldout_tasks = 2

[evaluation]
kind_field = "shape"
"""
SHAPES = """\
from pydantic import Field

from armature import GeneratedEnvironment, Observation, Outcome, Settings, project_path
from own_grades import grade


class ShapesSettings(Settings):
    words: str = Field(description="A file of words.")


class Shapes(GeneratedEnvironment):
    name = "shapes"
    Settings = ShapesSettings
    max_turns = 1
    reward_weights = {"correct": 1.0}

    def payload(self, seed, index):
        return {"shape": project_path(self.settings.words).read_text().split()[index % 2], "seed": seed}

    def episode(self, task):
        return ShapesEpisode(task.payload)


class ShapesEpisode:
    def __init__(self, payload):
        self._payload = payload

    async def reset(self):
        return Observation(("Which shape?",))

    async def step(self, action):
        return Outcome(None, {"correct": grade(action, self._payload["shape"])})

    async def close(self):
        pass
"""
FILES = {
    "recipe.toml": RECIPE,
    "own_shapes.py": SHAPES,
    "own_grades.py": "def grade(answer, shape):\n    return float(answer == shape)\n",
    "words/list.txt": "circle square\n",
    "unrelated.py": "",
}


@pytest.fixture
def project(tmp_path) -> Path:
    for name, text in FILES.items():
        (tmp_path / "first" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "first" / name).write_text(text)
    return tmp_path / "first"


@pytest.fixture
def printed(armature) -> Callable[..., str]:
    """Return a function that runs a command in the folder that has the projects and the store. It returns the command's
    output, followed by the exit code if that is not 0."""

    def run(*words: str) -> str:
        done = armature(*words)
        return done.stdout + done.stderr + (f"exit code {done.code}" if done.code else "")

    return run


def edited(project: Path, copy: str, name: str, before: str, after: str) -> None:
    """Copy the project to the folder `copy` beside it, and replace `before` by `after` in its file `name`."""
    shutil.copytree(project, project.parent / copy)
    file = project.parent / copy / name
    assert before in file.read_text()
    file.write_text(file.read_text().replace(before, after))


def test_only_files_that_a_recipe_uses_change_its_artifacts(project, printed):
    """A copy for each edit: in one process a module stays as it was loaded."""
    assert "tasks: made in" in printed("stage", "tasks", "--config", "first/recipe.toml", "--out", "first/data/tasks")
    assert (project / "data/tasks/train.parquet").is_file() and (project.parent / ".armature/store").is_dir()
    edits = {
        "own_grades.py": ("answer ==", "answer.strip() =="),
        "own_shapes.py": ("Which shape?", "What shape?"),
        "words/list.txt": ("circle", "disc"),
        "unrelated.py": ("", "VALUE = 1\n"),
    }
    for number, (name, edit) in enumerate(edits.items()):
        edited(project, f"copy{number}", name, *edit)
        done = printed("stage", "tasks", "--config", f"copy{number}/recipe.toml")
        assert ("already made" if name == "unrelated.py" else "made in") in done, name


def test_code_edited_during_a_stage_counts_as_at_its_start(project, printed):
    """And not even a broken file costs what was made."""
    ours = project / "own_shapes.py"
    spoil = 'Path(__file__).with_name("own_" + "grades.py").write_text("def (")'
    made = "        if Path('spo' + 'il').exists():\n            " + spoil + "\n        return {"
    ours.write_text("from pathlib import Path\n" + ours.read_text().replace("        return {", made))
    printed("stage", "tasks", "--config", "first/recipe.toml", "--out", "kept")
    shutil.copytree(project, project.parent / "second")
    Path("spoil").touch()
    done = printed("stage", "tasks", "--config", "second/recipe.toml", "--force", "tasks", "--out", "spoiled")
    assert "tasks: made in" in done and (project.parent / "second/own_grades.py").read_text() == "def ("
    saved, spoiled = (json.loads(Path(name, "manifest.json").read_text())["sources"] for name in ("kept", "spoiled"))
    assert saved == spoiled and "code" in saved


def test_check_show_and_list_accept_own_recipe(project, printed, tmp_path):
    program = ["--configuration-only", "--machine", f"servers.python={sys.executable}"]
    assert "train-vlm/recipe: every value is valid" in printed("check", "first/recipe.toml", *program)
    shown = printed("show", str(project / "recipe.toml"), "--set", "trainer.max_steps=3")
    values = tomllib.loads(shown)
    assert values["flow"] == "train-vlm" and values["environment"]["args"] == {"words": "words/list.txt"}
    (project / "again.toml").write_text(shown)
    again = tomllib.loads(printed("show", "first/again.toml"))
    assert again == values
    assert "own_shapes" not in printed("list")


def test_deployment_runs_in_the_folder_of_the_recipe(project, monkeypatch):
    monkeypatch.chdir(project.parent)
    ours, installed = (deployment(load_recipe(name)) for name in (Path("first/recipe.toml"), "train-vlm/colors"))
    assert ours["entrypoint"] == installed["entrypoint"]
    assert ours["parameters"]["environment"]["name"] == "own_shapes:Shapes"
    assert ours["pull_steps"] == [*installed["pull_steps"], {USE_PROJECT: {"folder": "first"}}]


def test_own_recipe_may_be_of_any_kind_and_in_any_folder(tmp_path):
    file = tmp_path / "mine.toml"
    for kind in RECIPES:
        installed = next(name for name in recipe_names() if load_recipe(name).kind == kind)
        file.write_text(f'flow = "{kind}"\nextends = "{installed}"\n')
        recipe = load_recipe(file)
        assert (recipe.kind, recipe.folder) == (kind, tmp_path)
        assert recipe.name == f"{recipe.flow}/mine" and recipe.sections == load_recipe(installed).sections
        assert deployment(recipe)["entrypoint"] == RECIPES[kind].FLOW


@pytest.mark.parametrize(
    ("before", "after", "output"),
    [
        ('flow = "train-vlm"\n', "", "does not say its flow"),
        ('"train-vlm"', '"train-vml"', "did you mean 'train-vlm'"),
        ('"train-vlm/colors"', '"train-vlm/colrs"', "wrong/recipe.toml, extends"),
        ("own_shapes:Shapes", "own_shapes:Shape", "has no 'Shape'"),
        ("own_shapes:Shapes", "own_shape:Shapes", "write own_shape.py beside the recipe"),
        ("own_shapes:Shapes", "own_shapes:grade", "is not an environment"),
        ("own_shapes:Shapes", "nobody-has-this", "or MODULE:NAME of a module beside the recipe"),
        ("words =", "word =", "did you mean 'words'"),
        ("[environment]", "[environment", "not valid TOML"),
    ],
)
def test_invalid_own_recipe_is_an_error(project, printed, before, after, output):
    edited(project, "wrong", "recipe.toml", before, after)
    done = printed("check", "wrong/recipe.toml", "--configuration-only")
    assert output in done and done.endswith("exit code 2") and "Traceback" not in done
    assert "exit code" not in printed("list")


def test_missing_recipe_suggests_similar_name(project, printed):
    assert "first/recipes.toml" in printed("run", "first/recipes.toml")
    assert "'first/recipe.toml'" in printed("run", "first/recipe")


@pytest.mark.parametrize("name", list(RECIPES))
def test_worker_loads_each_flow_by_its_module(name):
    from prefect.flows import load_flow_from_entrypoint

    assert load_flow_from_entrypoint(RECIPES[name].FLOW, use_placeholder_flow=False) is flow_of(name)
