"""Recipes: extension, overrides, and errors that say what to do."""

from __future__ import annotations

import subprocess
import sys

import pytest

from components.configuration import (
    build_recipe,
    load_recipe,
    merge,
    parse_override,
    read_toml,
    recipe_names,
    recipe_path,
)
from components.contracts.errors import ConfigurationError


def test_files_extend_each_other_table_by_table(tmp_path):
    (tmp_path / "base.toml").write_text('a = 1\n[t]\nx = 1\ny = [1, 2]\n[t.deep]\nz = "old"\n')
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub/top.toml").write_text('extends = "../base.toml"\n[t]\ny = [3]\n[t.deep]\nz = "new"\n')
    assert read_toml(tmp_path / "sub/top.toml") == {"a": 1, "t": {"x": 1, "y": [3], "deep": {"z": "new"}}}


def test_a_circle_a_missing_file_and_bad_toml_are_said(tmp_path):
    (tmp_path / "a.toml").write_text('extends = "b.toml"')
    (tmp_path / "b.toml").write_text('extends = "a.toml"')
    with pytest.raises(ConfigurationError, match=r"a.toml -> b.toml -> a.toml"):
        read_toml(tmp_path / "a.toml")
    with pytest.raises(ConfigurationError, match="TOML config not found"):
        read_toml(tmp_path / "none.toml")
    (tmp_path / "bad.toml").write_text("a = ")
    with pytest.raises(ConfigurationError, match="not valid TOML"):
        read_toml(tmp_path / "bad.toml")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a.b=1", {"a": {"b": 1}}),
        ("a.b=1e-5", {"a": {"b": 1e-5}}),
        ("a.b=true", {"a": {"b": True}}),
        ('a.b=["x", "y"]', {"a": {"b": ["x", "y"]}}),
        ("a.b=tiny/qwen2-vl", {"a": {"b": "tiny/qwen2-vl"}}),
        ("a.b={c = 1}", {"a": {"b": {"c": 1}}}),
        ("a=x=y", {"a": "x=y"}),
    ],
)
def test_overrides_are_toml_values_or_bare_strings(text, expected):
    assert parse_override(text) == expected


def test_an_override_without_an_equals_sign_is_refused():
    with pytest.raises(ConfigurationError, match="write --set"):
        parse_override("trainer.max_steps")


def test_an_override_without_a_value_takes_away_a_setting_or_a_section():
    changed = ["dataset.path=data/mine", "dataset.revision="]
    assert load_recipe("train-vla/molmoact2", changed).dump()["dataset"]["revision"] is None
    assert "demonstrations" not in load_recipe("train-vla/tiny", ["demonstrations=", "layout="]).sections
    with pytest.raises(ConfigurationError, match=r"trainer.max_steps: Field required"):
        load_recipe("train-vlm/colors", ["trainer.max_steps="])


def test_merging_replaces_lists_and_scalars_whole():
    assert merge({"a": [1, 2], "b": {"c": 1, "d": 2}}, {"a": [3], "b": {"c": 4}}) == {"a": [3], "b": {"c": 4, "d": 2}}


def test_unknown_names_suggest_the_nearest():
    with pytest.raises(ConfigurationError, match=r"did you mean 'train-vlm/colors'"):
        load_recipe("train-vlm/colours")
    with pytest.raises(ConfigurationError, match=r"no flow is called 'train'"):
        build_recipe("train/x", {}, where="test")
    with pytest.raises(ConfigurationError, match=r"unknown section 'trainr'(?s:.*)did you mean 'trainer'"):
        build_recipe("train-vlm/x", {"trainr": {}}, where="test")


def test_an_unknown_key_and_a_bad_value_name_their_place():
    with pytest.raises(
        ConfigurationError, match=r"trainer.learning_rat is not a setting; did you mean 'learning_rate'"
    ):
        load_recipe("train-vlm/colors", ["trainer.learning_rat=1"])
    with pytest.raises(ConfigurationError, match=r"trainer.max_steps: .*greater than 0 \(given -3\)"):
        load_recipe("train-vlm/colors", ["trainer.max_steps=-3"])


def test_several_nodes_need_a_place_to_meet():
    with pytest.raises(ConfigurationError, match=r"trainer_nodes = 2 needs trainer_rendezvous, the HOST:PORT"):
        load_recipe("train-vla/molmoact2", ["machine.trainer_nodes=2"])
    with pytest.raises(ConfigurationError, match=r"machine.trainer_rendezvous: .*given 'first'"):
        load_recipe("train-vla/molmoact2", ["machine.trainer_nodes=2", "machine.trainer_rendezvous=first"])
    load_recipe("train-vla/molmoact2", ["machine.trainer_nodes=2", "machine.trainer_rendezvous=first:29500"])


@pytest.mark.parametrize("name", recipe_names())
def test_every_committed_recipe_loads_and_its_dump_loads_again(name):
    recipe = load_recipe(name)
    assert recipe.description
    again = build_recipe(name, recipe.dump() | {"description": recipe.description}, where="dump")
    assert again == recipe


def test_recipes_load_without_torch_and_prefect():
    code = (
        "import sys; from components.configuration import load_recipe; load_recipe('train-vlm/colors');"
        "assert not {'torch', 'transformers', 'prefect', 'mlflow', 'dvc'} & set(sys.modules), sorted(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_an_optional_section_may_be_left_out_but_not_half_given():
    values = read_toml(recipe_path("train-vlm/colors"))
    assert "warm_start" not in build_recipe("train-vlm/colors", values, "here").sections
    with pytest.raises(ConfigurationError, match=r"warm_start.demonstrations: Field required"):
        build_recipe("train-vlm/colors", values | {"warm_start": {"epochs": 1}}, "here")
