"""Problems of a recipe with a table that are found before the table is read or a task is made."""

from __future__ import annotations

from pathlib import Path

import pytest

from armature.components.configuration import load_recipe
from armature.components.machine.project import project
from tests.refusals import refused

RECIPE = """
flow = "train-vlm"
extends = "train-vlm/colors"

[environment]
name = "dataset"
train_tasks = 8
heldout_tasks = 4

[environment.args]
source = "rows.jsonl"
prompt = "{image}{image}{q}"
images = ["first", "second"]
answer = "a"
kind = "k"
rewards = [{ name = "function", function = "mine:reward" }]
"""
MODULE = """
def reward(completion, answer): return float(completion == answer)
def needs_prompts(completion, prompts): return 1.0
def takes_nothing(): return 1.0
number = 3
"""
ENVIRONMENT = """
from armature import GeneratedEnvironment, Settings

class Raising(GeneratedEnvironment):
    name, Settings = "raising", Settings
    def payload(self, seed, index): return {"part": 1 / index}
    def episode(self, task): raise NotImplementedError
"""


def refuse_ahead(folder: Path, *overrides: str) -> None:
    """Make the check that `armature check --configuration-only` makes of the sections."""
    recipe = load_recipe(folder / "recipe.toml", overrides)
    with project(recipe.folder):
        recipe.values.refuse_ahead()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "recipe.toml").write_text(RECIPE)
    (tmp_path / "rows.jsonl").write_text("no JSON")
    (tmp_path / "mine.py").write_text(MODULE)
    (tmp_path / "broken.py").write_text("import not_installed_anywhere\n")
    (tmp_path / "games.py").write_text(ENVIRONMENT)
    return tmp_path


def test_recipe_is_checked_without_reading_its_data(folder: Path) -> None:
    refuse_ahead(folder)
    refuse_ahead(folder, "evaluation.kind_field=row", "inference.max_images_per_prompt=2")
    for source in ("*.jsonl", ".", "s3://nowhere/rows.jsonl"):
        refuse_ahead(folder, f"environment.args.source={source}")
    refuse_ahead(folder, "environment.args.source=nobody/nothing", "environment.args.revision=main")


def rewards(entry: str) -> str:
    return f"environment.args.rewards=[{{ {entry} }}]"


@pytest.mark.parametrize(
    ("override", "code", "values"),
    [
        (rewards('name = "function", function = "mine:needs_prompts"'), "unknown_reward_argument", ["'prompts'"]),
        (rewards('name = "function", function = "mine:takes_nothing"'), "completion_not_taken", ["takes_nothing"]),
        (rewards('name = "function", function = "mine:number"'), "not_a_function", ["mine:number"]),
        (rewards('name = "function", function = "mine:other"'), "name_not_in_module", ["mine.py", "'other'"]),
        (rewards('name = "function", function = "broken:reward"'), "name_not_loadable", ["broken.py, line 1"]),
        (rewards('name = "function", function = "missing:reward"'), "module_missing", ["missing.py"]),
        (rewards('name = "command", command = ["./grade"]'), "program_missing", ["./grade"]),
        (["environment.args.answer=", rewards('name = "exact_match"')], "answer_missing", ["environment.args.answer"]),
        ("environment.args.source=row.jsonl", "data_file_missing", ["'row.jsonl'", "'rows.jsonl'"]),
        ("environment.args.source=*.csv", "data_file_missing", ["*.csv"]),
        ("environment.args.source=data/rows.jsonl", "data_folder_missing", ["data"]),
        ("environment.args.source=./data", "data_file_missing", ["data"]),
        ("environment.args.source=data/rows", "revision_missing", ["data/rows"]),
        ("evaluation.kind_field=color", "unknown_kind_field", ["evaluation.kind_field", "environment.args.kind"]),
        ("environment.args.kind=", "unknown_kind_field", ["'kind'", "environment.args.kind"]),
        ("inference.max_images_per_prompt=1", "too_many_images", ["2", "inference.max_images_per_prompt"]),
    ],
)
def test_problem_is_found_before_the_table_is_read(
    folder: Path, override: str | list[str], code: str, values: list[str]
) -> None:
    with refused(code, *values):
        refuse_ahead(folder, "evaluation.kind_field=kind", *([override] if isinstance(override, str) else override))


def test_unknown_kind_field_of_generated_tasks_is_found_before_they_are_made(folder: Path) -> None:
    colors = load_recipe("train-vlm/colors", ["evaluation.kind_field=hue"])
    with refused("unknown_kind_field", "'hue'", "color"):
        colors.values.refuse_ahead()
    load_recipe("train-vlm/colors").values.refuse_ahead()
    (folder / "recipe.toml").write_text(RECIPE.partition("[environment.args]")[0].replace("dataset", "games:Raising"))
    with refused("tasks_not_listed", "ZeroDivisionError", "games.py, line 6"):
        refuse_ahead(folder, "evaluation.kind_field=part")
