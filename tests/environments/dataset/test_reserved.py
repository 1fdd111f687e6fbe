"""Rows that contain special tokens of the model: refused, or left out and counted, when the tasks are made."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from armature.components.configuration import load_recipe
from armature.components.configuration.stages import STAGES, fingerprint, run_stage
from armature.components.environments.settings import EnvironmentSettings
from armature.components.families.family import FAMILIES
from armature.components.machine.project import project
from armature.components.rl.settings import TrainVLMSettings
from tests.refusals import refused

RECIPE = """
flow = "train-vlm"
extends = "train-vlm/colors"
[environment]
name = "dataset"
train_tasks = 99
heldout_tasks = 99
[environment.args]
source = "rows.jsonl"
split = { by = "hash", heldout = 0.3 }
rewards = [{ name = "exact_match" }]
[evaluation]
kind_field = ""
"""
PLAIN = {"prompt": "{q}", "answer": "a"}
CHAT = {"conversation": "c"}
IMAGE, TURN = "<|image_pad|>", "<|im_end|>"


def row(number: int, token: str, place: str) -> dict[str, Any]:
    """A row whose text at `place`, a column or a message of the conversation, ends with `token`."""
    texts = {name: f"{name} {number}" for name in ("q", "a", "s", "first", "said", "asked", "last")}
    texts[place] += token
    chat = [("system", "first"), ("user", "said"), ("assistant", "said"), ("user", "asked"), ("assistant", "last")]
    parts = [{"role": role, "content": texts[name]} for role, name in chat]
    return {**texts, "list": ["x", texts["q"]], "c": parts}


def listed(folder: Path, rows: list[dict[str, Any]], *changes: str, **args: Any) -> tuple[Any, dict[str, int]]:
    """Run the tasks stage on `rows` and return its settings and the drops in the manifest."""
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    recipe_file = folder / "recipe.toml"
    recipe_file.write_text(RECIPE)
    values = [f"environment.args.{key}={json.dumps(value)}" for key, value in {**PLAIN, **args}.items()]
    recipe = load_recipe(recipe_file, [f'machine.store="{folder / "store"}"', *values, *changes])
    settings = recipe.settings_for(EnvironmentSettings)
    with project(folder):
        made = run_stage("tasks", settings, {}, recipe.sections["machine"])  # type: ignore[arg-type]
    return settings, json.loads((made.path / "manifest.json").read_bytes())["drops"]


@pytest.mark.parametrize(
    ("place", "args"),
    [
        ("q", {}),
        ("q", {"prompt": "{list}"}),
        ("q", {"prompt": "{list[1]} and {s}"}),
        ("a", {}),
        ("s", {"system": "{s}"}),
        ("s", {"demonstration": "{s}"}),
        *((place, {"prompt": "", "answer": "", **CHAT}) for place in ("first", "said", "asked", "last")),
    ],
)
def test_special_token_is_found_in_every_text_for_the_model(place: str, args: dict[str, Any], tmp_path: Path) -> None:
    rows = [row(number, IMAGE if number % 4 == 1 else "", place) for number in range(40)]
    with refused("rows_unusable", "10 reserved_token", "rows.jsonl, row 1:", IMAGE):
        listed(tmp_path, rows, **args)
    _, drops = listed(tmp_path, rows, on_bad_row="skip", **args)
    assert drops == {"reserved_token": 10}
    unused = {"prompt": "{q}", "answer": "a"} if place not in ("q", "a") else {"prompt": "{s}", "answer": "last"}
    assert listed(tmp_path, rows, **unused)[1] == {}


def test_special_token_joined_from_two_columns_is_found(tmp_path: Path) -> None:
    rows = [{"q": f"question {n} <|image", "a": "x", "s": "_pad|>"} for n in range(20)]
    with refused("rows_unusable", "20 reserved_token"):
        listed(tmp_path, rows, prompt="{q}{s}")


def test_allow_special_tokens_excludes_image_tokens(tmp_path: Path) -> None:
    rows = [row(number, (IMAGE, TURN, "", "")[number % 4], "q") for number in range(40)]
    assert listed(tmp_path, rows, on_bad_row="skip")[1] == {"reserved_token": 20}
    assert listed(tmp_path, rows, on_bad_row="skip", allow_special_tokens=True)[1] == {"reserved_token": 10}
    rows = [row(number, TURN, "q") for number in range(40)]
    assert listed(tmp_path, rows, allow_special_tokens=True)[1] == {}
    with refused("rows_unusable", "40 reserved_token"):  # tokens that the recipe itself reserves are never allowed
        listed(tmp_path, rows, allow_special_tokens=True, reserved_tokens=[TURN])


@pytest.mark.parametrize("family", FAMILIES)
def test_each_family_reserves_its_own_image_tokens(family: str, tmp_path: Path) -> None:
    tokens = FAMILIES[family].image_tokens
    others = {token for each in FAMILIES.values() for token in each.image_tokens} - set(tokens)
    rows = [row(number, token, "q") for number, token in enumerate([*tokens, *sorted(others), *[""] * 20])]
    _, drops = listed(tmp_path, rows, f'model.source="tiny/{family}"', on_bad_row="skip")
    assert drops == {"reserved_token": len(tokens)}


def test_tasks_fingerprint_depends_on_tokens_not_on_other_model_settings(tmp_path: Path) -> None:
    rows = [row(number, "", "q") for number in range(40)]

    def key(*changes: str) -> str:
        settings, _ = listed(tmp_path, rows, *changes)
        with project(tmp_path):
            return fingerprint(STAGES["tasks"], settings, {})

    first = key()
    assert key("model.tiny.seed=1", "trainer.max_steps=3") == key('model.source="tiny/qwen2.5-vl"') == first
    assert key('model.source="tiny/llava"') != first


def test_training_settings_have_no_reserved_tokens(tmp_path: Path) -> None:
    listed(tmp_path, [row(number, "", "q") for number in range(40)])
    changes = [f"environment.args.{key}={json.dumps(value)}" for key, value in PLAIN.items()]
    settings = load_recipe(tmp_path / "recipe.toml", changes).settings_for(TrainVLMSettings)
    assert isinstance(settings, TrainVLMSettings) and settings.environment.args["reserved_tokens"] == []
