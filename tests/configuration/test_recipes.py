"""Recipes say what is their own, and mean what they meant."""

from __future__ import annotations

import json
import re
import shutil
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import BaseModel

from armature.components.configuration import CONFIGS, load_recipe, recipe_from_file, recipe_names
from armature.components.configuration.recipes import RECIPES
from armature.components.contracts.errors import ConfigurationError
from armature.components.environments import ENVIRONMENTS
from armature.components.evaluation.settings import EvaluateStageSettings
from tests.refusals import refused

FILES = sorted(path.relative_to(CONFIGS) for path in CONFIGS.glob("*/*.toml"))
FROZEN = Path(__file__).with_name("recipes.json")
"""File with the resolved values of all recipes, by recipe and dotted key. A change of a recipe's meaning must change
this file too."""

Keys = tuple[str | int, ...]


def leaves(value: Any, at: Keys = ()) -> Iterator[Keys]:
    """Yield the key path of every value in a document. An empty table counts as a value."""
    if isinstance(value, dict) and value:
        for key, part in value.items():
            yield from leaves(part, (*at, key))
    elif isinstance(value, list) and value and all(isinstance(part, dict) for part in value):
        for index, part in enumerate(value):
            yield from leaves(part, (*at, index))
    else:
        yield at


def without(value: Any, at: Keys) -> Any:
    if isinstance(value, list):
        return [without(part, at[1:]) if index == at[0] else part for index, part in enumerate(value)]
    if len(at) == 1:
        return {key: part for key, part in value.items() if key != at[0]}
    return value | {at[0]: without(value[at[0]], at[1:])}


def inline(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(key)} = {inline(part)}" for key, part in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(inline, value)) + "]"
    return json.dumps(value)


def document(values: dict[str, Any]) -> str:
    return "".join(f"{key} = {inline(part)}\n" for key, part in values.items())


def bases(file: Path) -> Iterator[Path]:
    """Yield the recipe files that `file` extends, directly or indirectly, relative to CONFIGS."""
    extends = tomllib.loads((CONFIGS / file).read_text()).get("extends")
    if extends:
        base = extends["file"] if isinstance(extends, dict) else extends
        result = (CONFIGS / file.parent / base).resolve().relative_to(CONFIGS)
        yield result
        yield from bases(result)


VARIANT_TAGS = {"name", "mode", "form", "source", "by"}


def at(values: Any, key: str) -> Any:
    for part in key.split("."):
        values = values[part]
    return values


@pytest.mark.parametrize("file", FILES, ids=str)
def test_recipe_files_contain_no_redundant_values(file, tmp_path):
    """Without it a recipe is another, or none: it is neither the default nor what the extended file says.

    Which variant a table is may always be said: a reader should not have to know the default.
    """
    configs = tmp_path / "configs"
    shutil.copytree(CONFIGS, configs)
    users = [name for name in recipe_names() if file in {each := Path(f"{name}.toml"), *bases(each)}]
    assert users, "no recipe extends it"
    whole = {name: load_recipe(name).sections for name in users}
    values = tomllib.loads((CONFIGS / file).read_text())
    for key in leaves(
        {name: part for name, part in values.items() if name not in ("description", "gpu_gib", "extends")}
    ):
        if key[-1] in VARIANT_TAGS and len(key) > 2:
            continue
        (configs / file).write_text(document(without(values, key)))
        assert any(_differs(configs, name, whole[name]) for name in users), f"{'.'.join(map(str, key))} can be left out"


def _differs(configs: Path, name: str, whole: Any) -> bool:
    try:
        return recipe_from_file(configs / f"{name}.toml", name).sections != whole
    except ConfigurationError:
        return True


@pytest.mark.parametrize("name", recipe_names())
def test_description_names_the_memory_that_gpus_need(name):
    recipe = load_recipe(name)
    assert re.findall(r"(\d+) GiB", recipe.description) == [str(recipe.gpu_gib)] * (recipe.gpu_gib is not None)


def test_memory_of_gpus_is_inherited_and_a_number(tmp_path):
    own = tmp_path / "own.toml"
    for line, gib in (("", 80), ("gpu_gib = 48\n", 48)):
        own.write_text(f"extends = 'train-vlm/chartqa-7b'\nflow = 'train-vlm'\n{line}")
        assert load_recipe(own).gpu_gib == gib
    with refused("invalid_gpu_gib", own, "many"):
        load_recipe(own, ["gpu_gib=many"])


def test_no_recipe_extends_the_demo():
    demo = Path("train-vlm/colors.toml")
    assert not [str(file) for file in FILES if demo in bases(file)]


def settings_classes(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
        for field in annotation.model_fields.values():
            yield from settings_classes(field.annotation)
    for part in get_args(annotation):
        yield from settings_classes(part)


def test_every_setting_has_a_description():
    environments = [ENVIRONMENTS[name].Settings for name in ENVIRONMENTS]
    classes = {each for kind in (*map(RECIPES.__getitem__, RECIPES), *environments) for each in settings_classes(kind)}
    assert len(classes) > 40
    for each in classes:
        for name, field in each.model_fields.items():
            assert (field.description or "").endswith("."), f"{each.__name__}.{name}"


@pytest.mark.parametrize("name", json.loads(FROZEN.read_text()))
def test_resolved_recipes_are_unchanged(name):
    resolved = load_recipe(name).dump()
    for key, expected in json.loads(FROZEN.read_text())[name].items():
        result = at(resolved, key)
        assert (result, type(result)) == (expected, type(expected)), key


@pytest.mark.parametrize("name", ["evaluate/vlm", "evaluate/sweep"])
def test_evaluation_recipe_matches_the_demo(name):
    trained, evaluated = load_recipe("train-vlm/colors"), load_recipe(name)
    for section in ("model", "environment", "inference", "machine"):
        assert evaluated.sections[section] == trained.sections[section]
    assert evaluated.settings_for(EvaluateStageSettings).model_dump() == (
        trained.settings_for(EvaluateStageSettings).model_dump()
    )


def test_fingerprint_includes_environment_defaults():
    args = load_recipe("train-vlm/colors").dump()["environment"]["args"]
    assert args["noise"] == 16.0 and args["colors"]["white"] == [235, 235, 235]
    assert load_recipe("train-vlm/colors", ["environment.args.noise=16"]) == load_recipe("train-vlm/colors")


@pytest.mark.parametrize("name", ["sft/colors", "train-vlm/colors-distilled"])
def test_rejects_a_teacher_that_rewards_alone_do_not_train(name):
    values = load_recipe("train-vlm/colors-distilled", [f"teacher.recipe={name}"]).values
    with refused("teacher_recipe_not_usable", "teacher.recipe", name):
        values.refuse_ahead()
