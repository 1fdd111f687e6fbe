"""Recipes: extension, overrides, and errors that say what to do."""

from __future__ import annotations

import itertools
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from armature.components.configuration import (
    CONFIGS,
    build_recipe,
    load_recipe,
    merge,
    parse_override,
    read_toml,
    recipe_path,
)
from armature.components.contracts.errors import ConfigurationError
from armature.components.environments.openenv.settings import OpenEnvSettings
from armature.components.rl.settings import TrainVLMSettings
from armature.components.robots.datasets.settings import SourceSettings
from armature.components.training.processes import TrainerProcesses
from armature.deployments import deployment
from tests.refusals import refused

BASE_OF_COLORS = """
description = "Colors."
[environment]
name = "colors"
train_tasks = 8
[evaluation]
kind_field = "color"
seed = 3
"""


@pytest.mark.parametrize(
    ("over", "expected"),
    [
        ('[environment]\nname = "dataset"', {"environment": {"name": "dataset"}, "evaluation": {"seed": 3}}),
        (
            '[environment]\nname = "dataset"\n[evaluation]\nkind_field = "kind"',
            {"environment": {"name": "dataset"}, "evaluation": {"seed": 3, "kind_field": "kind"}},
        ),
        (
            '[environment]\nname = "colors"\nheldout_tasks = 2',
            {
                "description": "Colors.",
                "environment": {"name": "colors", "train_tasks": 8, "heldout_tasks": 2},
                "evaluation": {"seed": 3, "kind_field": "color"},
            },
        ),
    ],
    ids=["other environment", "other environment and field", "same environment"],
)
def test_other_environment_inherits_nothing_of_the_former(tmp_path, over, expected):
    (tmp_path / "base.toml").write_text(BASE_OF_COLORS)
    (tmp_path / "top.toml").write_text(f'extends = "base.toml"\n{over}\n')
    assert read_toml(tmp_path / "top.toml") == expected


@pytest.mark.parametrize(
    ("kind", "field", "expected"), [("", None, ""), ("k", None, "kind"), ("k", "", ""), ("k", "row", "row")]
)
def test_column_kind_is_enough_to_break_accuracy_down(kind, field, expected):
    args = {"source": "rows.jsonl", "prompt": "{q}", "kind": kind, "rewards": [{"name": "exact_match"}]}
    values = read_toml(recipe_path("train-vlm/colors")) | {"environment": {"name": "dataset", "args": args}}
    values["evaluation"] = {"sampling": {"max_tokens": 4}} | ({} if field is None else {"kind_field": field})
    assert build_recipe("train-vlm/own", values, "").sections["evaluation"].kind_field == expected


def test_recipe_files_extend_table_by_table(tmp_path):
    (tmp_path / "base.toml").write_text('a = 1\n[t]\nx = 1\ny = [1, 2]\n[t.deep]\nz = "old"\n')
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub/top.toml").write_text('extends = "../base.toml"\n[t]\ny = [3]\n[t.deep]\nz = "new"\n')
    assert read_toml(tmp_path / "sub/top.toml") == {"a": 1, "t": {"x": 1, "y": [3], "deep": {"z": "new"}}}


def test_rejects_circular_missing_and_invalid_files(tmp_path):
    (tmp_path / "a.toml").write_text('extends = "b.toml"')
    (tmp_path / "b.toml").write_text('extends = "a.toml"')
    with refused("circular_extends", "a.toml", "b.toml"):
        read_toml(tmp_path / "a.toml")
    with refused("recipe_file_missing", "none.toml"):
        read_toml(tmp_path / "none.toml")


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
    assert merge({}, parse_override("a.b.c=")) == {"a": {"b": {}}}, "an empty value takes away nothing"


@pytest.mark.parametrize("digest", ["7e91234567", "0123456789", "1234567890", "12e45", "1_000", "-1", "inf"])
def test_number_stays_text_for_string_settings(digest):
    recipe = load_recipe("evaluate/vlm", [f"subject.checkpoint={digest}", "inference.max_model_len=1_024"])
    assert recipe.sections["subject"].checkpoint == digest
    assert recipe.sections["inference"].max_model_len == 1024


def test_key_order_does_not_change_settings():
    """A fingerprint does not see it, so no result may: here the order of a policy's images."""
    cameras = {"front": "a", "wrist": "b", "above": "c"}
    orders = [dict(each) for each in itertools.permutations(cameras.items())]
    sources = [SourceSettings(path="x", tag="x", cameras=each) for each in orders]
    assert {tuple(each.cameras.items()) for each in sources} == {(("above", "c"), ("front", "a"), ("wrist", "b"))}
    played = [
        OpenEnvSettings(base_url="http://127.0.0.1:1", max_turns=1, reset={"deep": [{"one": each}]}) for each in orders
    ]
    assert len({each.model_dump_json() for each in played}) == 1


def test_empty_override_removes_setting_or_section():
    changed = ["dataset.path=data/mine", "dataset.revision="]
    assert load_recipe("train-vla/molmoact2", changed).dump()["dataset"]["revision"] is None
    assert "evaluation" not in load_recipe("train-vla/tiny", ["evaluation="]).sections
    with refused("missing", "trainer.max_steps"):
        load_recipe("train-vlm/colors", ["trainer.max_steps="])


def test_inherited_sections_and_settings_can_be_left_out(tmp_path):
    left_out = ["demonstrations", "layout", "simulator", "evaluation", "training.heldout.frames", "policy.tiny"]
    (tmp_path / "own.toml").write_text(
        f"flow = 'train-vla'\nextends = {{file = 'train-vla/tiny', without = {left_out}}}\n"
        "dataset.path = 'robot'\npolicy.tiny.seed = 3\n"
    )
    values, base = read_toml(tmp_path / "own.toml"), read_toml(CONFIGS / "train-vla/tiny.toml")
    assert base["policy"]["tiny"].keys() >= {"corpus", "initializer_range"}
    assert values["policy"]["tiny"] == {"seed": 3}, "its own table has nothing of the inherited one"
    assert values["training"]["heldout"] == {"fraction": 0.15, "every": 200}
    sections = load_recipe(tmp_path / "own.toml").sections
    assert sections.keys() == {"policy", "statistics", "training", "machine", "dataset"}


@pytest.mark.parametrize(
    ("key", "name", "nearest"),
    [
        ("without", "evaluaton", "evaluation"),
        ("without", "training.heldot", "training.heldout"),
        ("sections", "polcy", "policy"),
    ],
)
def test_named_sections_and_settings_have_to_be_inherited(tmp_path, key, name, nearest):
    (tmp_path / "own.toml").write_text(f"extends = {{file = 'train-vla/tiny', {key} = ['{name}']}}")
    with refused("not_inherited", name, nearest, f"extends.{key}", kind=ConfigurationError):
        load_recipe(tmp_path / "own.toml")


def test_unknown_names_suggest_the_nearest():
    with refused("unknown_recipe", "train-vlm/colors"):
        load_recipe("train-vlm/colrs")
    with refused("unknown_flow", "'train'"):
        build_recipe("train/x", {}, where="test")
    with refused("unknown_section", "'trainr'", "'trainer'"):
        build_recipe("train-vlm/x", {"trainr": {}}, where="test")


@pytest.mark.parametrize(
    ("name", "code", "near"),
    [
        ("dice", "unknown_recipe", "'dice.toml'"),
        ("dcie.toml", "recipe_file_missing", "'dice.toml'"),
        (".", "unknown_recipe", "'copy.toml'"),
        ("a" * 5000, "unknown_recipe", "armature list"),
        ("colors", "unknown_recipe", "'train-vlm/colors'"),
        ("train-vlm/colors.toml", "unknown_recipe", "'train-vlm/colors'"),
        ("extended.toml", "recipe_file_missing", "'dice.toml'"),
        ("copy.toml", "recipe_file_missing", 'extends = "_base/tiny-qwen2-vl"'),
        ("extends.toml", "recipe_file_missing", "extends.toml, extends"),
        ("extends.toml", "recipe_file_missing", "'train-vlm/colors'"),
    ],
)
def test_unknown_file_suggests_what_is_there(tmp_path, monkeypatch, name, code, near):
    monkeypatch.chdir(tmp_path)
    Path("dice.toml").write_text('flow = "train-vlm"\nextends = "train-vlm/colors"\n')
    Path("extends.toml").write_text('extends = "train-vlm/colrs"')
    Path("extended.toml").write_text('flow = "train-vlm"\nextends = "dcie.toml"\n')
    shutil.copy(CONFIGS / "train-vlm/colors.toml", "copy.toml")
    with refused(code, near):
        load_recipe(name)
    assert load_recipe("dice.toml").flow == "train-vlm"
    Path("copy.toml").write_text(
        Path("copy.toml").read_text().replace("../_base/tiny-qwen2-vl.toml", "_base/tiny-qwen2-vl")
    )
    assert load_recipe("copy.toml", ["flow=train-vlm"]).dump() == load_recipe("train-vlm/colors").dump()


@pytest.mark.parametrize(
    ("override", "near"),
    [
        ("trainer.lr=1", "'learning_rate'"),
        ("trainer.max_lr=1", "'learning_rate'"),
        ("trainer.steps=3", "'max_steps'"),
        ("max_steps=5", "'trainer.max_steps'"),
        ("seed=5", "'trainer.seed' or 'rollouts.seed'"),
        ("trainer.temperature=1", "'rollouts.sampling.temperature'"),
        ("evaluation.temperature=0", "did you mean 'evaluation.sampling.temperature'"),
    ],
)
def test_unknown_key_suggests_what_was_meant(override, near):
    with refused("unknown_section" if "." not in override else "extra_forbidden", near):
        load_recipe("train-vlm/colors", [override])


@pytest.mark.parametrize(
    ("override", "code", "values"),
    [
        ("trainer.learning_rat=1", "extra_forbidden", "trainer.learning_rat 'learning_rate'"),
        ("trainer.max_steps=-3", "greater_than", "trainer.max_steps 0 -3"),
        ("trainer.correction.cap=2.0", "extra_forbidden", "trainer.correction.cap 'none' mode"),
        ("trainer.correction={mode='none', cap=2.0}", "extra_forbidden", "trainer.correction.cap 'none' mode"),
        ("trainer.objective.mask_ratio_lo=0.1", "extra_forbidden", "'mask_ratio' 'mask_ratio_low'"),
        ("trainer.objective={name='ppo', clip_hihg=0.2}", "extra_forbidden", "objective.clip_hihg 'ppo' 'clip_high'"),
        ("evaluation.panel_tasks=8", "extra_forbidden", "evaluation.panel_tasks 'heldout_tasks'"),
        ("machine.trainer_gpus=[0]", "extra_forbidden", "machine.trainer_gpus 'machine.trainer.gpus'"),
        ("machine.lease_timeout=9", "extra_forbidden", "machine.lease_timeout 'machine.limits.lease_timeout'"),
        ("machine.servers=2", "model_type", "machine.servers 'machine.servers.count'"),
        ("trainer.dr_grpo_length=4", "without_effect", "dr_grpo_length token"),
        ("trainer.aggregation=dr_grpo", "dr_grpo_length_missing", "dr_grpo_length"),
        ("trainer.logprobs={name='normal', chunk_tokens=8}", "extra_forbidden", "logprobs.chunk_tokens 'normal'"),
        ("rollouts.sampling.top_pp=1.0", "extra_forbidden", "rollouts.sampling.top_pp max_tokens temperature"),
        (
            "batches.advantage={name='gigpo', norm={name='mean_norm', std_floor=1.0}}",
            "extra_forbidden",
            "norm.std_floor",
        ),
        ("environment.args.nose=1.0", "extra_forbidden", "environment.args.nose 'noise'"),
        ("environment.args.noise=loud", "float_type", "environment.args.noise 'loud'"),
        ("environment.evaluation_args={nose=1.0}", "extra_forbidden", "environment.nose 'noise'"),
        ("evaluation.sampling={max_tokens=4, temperature=0.0, top_k=5}", "value_error", "top_p top_k"),
        ("machine.servers.endpoints=['10.0.0.7:8000']", "value_error", "endpoints 10.0.0.7:8000"),
        ("machine.servers.endpoints=['']", "value_error", "endpoints ''"),
        (
            "machine.servers.endpoints=['http://10.0.0.7:8000', 'http://10.0.0.7:8000/']",
            "value_error",
            "http://10.0.0.7:8000",
        ),
        ("warm_start.epochs=", "missing", "warm_start.learning_rate"),
    ],
)
def test_rejects_ineffective_and_misspelled_settings(override, code, values):
    with refused(code, *values.split()):
        load_recipe("train-vlm/colors", [override])


@pytest.mark.parametrize("corrected", ["trainer.correction={mode='truncate'}", "trainer.objective={name='mask_ratio'}"])
def test_fp8_servers_need_importance_correction(corrected):
    arguments = ["trainer.objective={name='ppo'}", "inference.quantization=fp8"]
    with refused("value_error", "trainer.correction.mode", "truncate"):
        load_recipe("train-vlm/colors", arguments)
    assert load_recipe("train-vlm/colors", [*arguments, corrected]).dump()["inference"]["quantization"] == "fp8"


def test_override_reaches_keys_of_default_variants():
    key = "environment.args.games.most_receptacles"
    games = load_recipe("train-vlm/molmo2-text").dump()["environment"]["args"]["games"]
    changed = load_recipe("train-vlm/molmo2-text", [f"{key}=4"]).dump()["environment"]["args"]["games"]
    assert games["most_receptacles"] != 4 and changed == {**games, "most_receptacles": 4}
    with refused("extra_forbidden", "games.folder", "'generated'"):
        load_recipe("train-vlm/molmo2-text", ["environment.args.games.folder=games"])


@pytest.mark.parametrize(
    ("recipe", "machine", "values"),
    [
        ("molmoact2", {"nodes": 2}, "trainer.nodes 2 cluster trainer"),
        ("molmoact2", {"interface": "eth0,eth1"}, "machine.trainer.interface 'eth0,eth1'"),
        ("molmoact2", {"sharding": "hybrid"}, "nodes 1 full"),
        ("tiny", {"sharding": "full"}, "machine.trainer sharding"),
    ],
)
def test_rejects_ranks_that_cannot_be_placed(recipe, machine, values):
    with refused("string_pattern_mismatch" if "," in values else "value_error", *values.split()):
        load_recipe(f"train-vla/{recipe}", [f"machine.trainer.{name}={value}" for name, value in machine.items()])


def test_valid_ways_to_shard_a_model():
    gpus = ["machine.trainer.processes=2", "machine.trainer.gpus=[0,1]"]
    for words, copies in ((gpus, 1), ([*gpus, "machine.trainer.sharding=none"], 2)):
        machine = load_recipe("train-vla/molmoact2", words).sections["machine"]
        processes = TrainerProcesses.of(machine)
        assert (processes.copies, processes.shards, processes.sharding is None) == (copies, 2 // copies, copies == 2)


def test_trainer_nodes_on_a_cluster():
    place = 'machine.cluster={address="auto", trainer={num_cpus=8, num_gpus=4}}'
    here, there = ["machine.trainer.gpus=[]", place], ["machine.trainer.processes=4", "machine.trainer.nodes=2"]
    machine = load_recipe("train-vla/molmoact2", [*here, *there]).sections["machine"]
    assert machine.gpus_of_trainer == (0, 1, 2, 3)
    processes = TrainerProcesses.of(machine)
    assert (processes.ranks, processes.sharding, processes.threads, processes.interface) == (8, "full", 2, None)
    for overrides, values in (
        ([place, *there], ["trainer.gpus", "cluster.trainer.num_gpus"]),
        ([*here, "machine.trainer.processes=2"], ["num_gpus = 4", "trainer.processes"]),
    ):
        with refused("value_error", *values):
            load_recipe("train-vla/molmoact2", overrides)
    with refused("value_error", "cluster.trainer", "weight_transfer"):
        load_recipe(
            "train-vlm/colors", ['machine.cluster={address="auto", trainer={}}', "machine.servers.weight_transfer=nccl"]
        )


@pytest.mark.parametrize(
    ("wanted", "value"),
    [
        ("resources={CPU=2}", "'CPU'"),
        ("resources={memory=2}", "'memory'"),
        ('resources={""=1}', "''"),
        ("resources={fast=0.00001}", "0.0001"),
        ("num_cpus=0.00001", "0.0001"),
        ("num_gpus=1.5", "1.5"),
        ("servers={resources={GPU=1}}", "'GPU'"),
        ("trainer={resources={fast=0.00001}}", "0.0001"),
    ],
)
def test_rejects_resources_that_ray_cannot_count(wanted, value):
    cluster = f'machine.cluster={{address="auto", {wanted}}}'
    with refused("value_error", "machine.cluster", value):
        load_recipe("train-vlm/colors", [cluster, "machine.workers.environments=2"])


def test_cluster_rollout_workers_need_reachable_servers():
    workers = ["machine.workers.rollouts=2", 'machine.cluster={address="auto"}']
    with refused("value_error", "workers.rollouts", "servers.endpoints"):
        load_recipe("train-vlm/colors", workers)
    load_recipe("train-vlm/colors", [*workers, 'machine.servers.endpoints=["http://10.0.0.7:8000"]'])
    with refused("value_error", "workers.environments", "workers.rollouts"):
        load_recipe("train-vlm/colors", workers[1:])


@pytest.mark.parametrize(("name", "robots"), [("train-vlm/colors", False), ("train-vla-rl/tiny", True)])
def test_recipe_imports_its_own_settings_and_neither_torch_nor_prefect(name, robots):
    code = f"""
import sys
from armature.components.configuration import load_recipe
load_recipe({name!r})
assert ("armature.components.robots" in sys.modules) == {robots!r}, sorted(sys.modules)
assert not {{"torch", "transformers", "prefect", "mlflow", "dvc"}} & set(sys.modules), sorted(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_stage_settings_are_built_once():
    recipe = load_recipe("train-vlm/colors", ["trainer.learning_rate=0.25"])
    settings = recipe.settings_for(TrainVLMSettings)
    assert settings.trainer is recipe.sections["trainer"] and settings.trainer.learning_rate == 0.25
    assert recipe.settings_for(TrainVLMSettings) is settings


OWN_TABLE = """
flow = "train-vlm"
extends = "train-vlm/colors"
[environment]
name = "dataset"
[environment.args]
source = "a.jsonl"
prompt = "{q}"
[[environment.args.rewards]]
"""
"""A recipe file, up to the first key of the first reward of its table."""


@pytest.mark.parametrize(
    ("lines", "code", "shown"),
    [
        ("function = 'rewards:close'", "reward_name_missing", ("rewards.0.name", 'name = "function"')),
        ("weight = 1.0", "reward_name_missing", ("rewards.0.name", "exact_match")),
        ("name = 'exact_mach'", "unknown_name", ("environment.args.rewards.0.name", "'exact_match'")),
        ("name = 'exact_match'\nwieght = 2.0", "extra_forbidden", ("environment.args.rewards.0.wieght",)),
        ("nme = 'exact_match'", "reward_name_missing", ("rewards.0.name",)),
        ("name = 'length'", "value_error", ("environment.args.rewards.0: ", "at_least")),
        ("name = 'exact_match'\n[batches.advantage]\nname = 'group_mean'\nscale = {}", "literal_error", ("scale",)),
        ("name = 'exact_match'\n[rollouts]\nsampling = 3", "model_type", ("{key = value}", "3")),
        ("name = 'exact_match'\n[environmnt]\nname = 'colors'", "unknown_section", ("'environment'",)),
        ("name = 'exact_match'\n[trainr]\nmax_steps = 1", "unknown_section", ("'trainer'",)),
        ("name = 'exact_match'\n[warm_strt]\nlearning_rate = 1.0\nmax_sequence_tokens = 9", "unknown_section", ()),
        (
            "name = 'exact_match'\n[teacher]\nsource = 'a'\nrecipe = 'b'",
            "value_error",
            ("teacher: ", "source", "recipe"),
        ),
        ("name = 'exact_match'\n[teacher]\nweight = 0.5", "value_error", ("teacher: ",)),
        ("name = 'exact_match'\n[warm_start]\nlearning_rte = 1.0\nmax_sequence_tokens = 9", "extra_forbidden", ()),
    ],
)
def test_one_mistake_is_reported_once_with_file_and_key(tmp_path, lines, code, shown):
    path = tmp_path / "own.toml"
    path.write_text(OWN_TABLE + lines)
    with refused(code, path, *shown) as caught:
        load_recipe(path)
    assert len(caught.value.what.splitlines()) == 1


def test_arguments_outside_their_table_are_reported_once_each():
    values = {"name": "dataset", "source": "a.jsonl", "prompt": "{q}", "rewards": [{"name": "exact_match"}]}
    with refused("extra_forbidden", "'environment.args.source'", "'environment.args.rewards'") as caught:
        build_recipe("train-vlm/x", read_toml(recipe_path("train-vlm/colors")) | {"environment": values}, "here")
    assert len(caught.value.what.splitlines()) == 3


def test_problems_of_all_sections_are_shown():
    with refused("extra_forbidden", "model.sauce", "trainer.max_steps"):
        load_recipe("train-vlm/colors", ["model.sauce=1", "trainer.max_steps=0"])
    with refused("unknown_section", "'rolouts'", "'max_steps'", "model.sauce", "trainer.max_steps"):
        load_recipe("train-vlm/colors", ["model.sauce=1", "trainer.max_steps=0", "rolouts.seed=1", "max_steps=3"])


def test_another_package_adds_a_flow(tmp_path, monkeypatch):
    (tmp_path / "count_lab.py").write_text(COUNT_LAB)
    (tmp_path / "count_lab-1.dist-info").mkdir()
    (tmp_path / "count_lab-1.dist-info/entry_points.txt").write_text("[armature.recipes]\ncount = count_lab:Count\n")
    (tmp_path / "mine.toml").write_text('flow = "count"\n[count]\nrows = 3\n')
    monkeypatch.syspath_prepend(str(tmp_path))
    recipe = load_recipe(tmp_path / "mine.toml")
    assert (recipe.name, recipe.dump()["count"]) == ("count/mine", {"rows": 3})
    assert deployment(recipe)["entrypoint"] == "count_lab.flows.count"
    with refused("extra_forbidden", "count.row", "'rows'"):
        load_recipe(tmp_path / "mine.toml", ["count.row=1"])


COUNT_LAB = """
from armature.components.contracts.machine import Machine
from armature.components.contracts.settings import Settings
from armature.components.configuration.recipes import MachineSection, Sections


class CountSettings(Settings):
    rows: int


class Count(Sections):
    FLOW = "count_lab.flows.count"

    count: CountSettings
    machine: MachineSection = Machine()
"""


def test_optional_section_must_be_complete_or_absent():
    values = read_toml(recipe_path("train-vlm/colors"))
    assert "warm_start" not in build_recipe("train-vlm/colors", values, "here").sections
    with refused("missing", "warm_start.learning_rate"):
        build_recipe("train-vlm/colors", values | {"warm_start": {"epochs": 1}}, "here")


@pytest.mark.parametrize(
    ("content", "code", "value"),
    [
        (b"a = ", "invalid_toml", "bad.toml"),
        (b"a = '\xff'", "invalid_toml", "bad.toml"),
        (b"a = " + b"[" * 100_000, "invalid_toml", "bad.toml"),
        (b"a = " + b"9" * 10_000, "invalid_toml", "bad.toml"),
        (b"#" * 5_000_000, "file_too_large", "4194304"),
        (b"extends = 3", "model_type", "3"),
        (b"extends = {file = 'b.toml', section = ['model']}", "extra_forbidden", "extends.section"),
        (b"extends = {file = 'b.toml', sections = 'model'}", "tuple_type", "extends.sections"),
        (b"extends = ''", "recipe_file_unreadable", ""),
        (b"extends = '/dev/zero'", "recipe_file_unreadable", "/dev/zero"),
        (b"extends = 'a\\u0000b'", "recipe_file_missing", "b"),
        *((b'extends = "' + b"a" * 5000 + end + b'"', "recipe_file_missing", "aaa") for end in (b"", b"/b.toml")),
    ],
)
def test_hostile_toml_is_a_configuration_error(tmp_path, content, code, value):
    (tmp_path / "b.toml").write_text("")
    (tmp_path / "bad.toml").write_bytes(content)
    with refused(code, value, kind=ConfigurationError):
        read_toml(tmp_path / "bad.toml")


@pytest.mark.parametrize(
    "text",
    [
        *("", "=", "=1", ".=1", "a.=1", ".a=1", "a..b=1", "a", "a.b", " =1", "a\0b=1", "a=\0", "a=\udcff", "\udcff=1"),
        *("a" + ".a" * 100_000 + "=1", "a=" + "[" * 100_000, "a=" + "9" * 10_000, "a=1\nb=2"),
    ],
    ids=lambda text: ascii(text)[:20],
)
def test_invalid_override_is_a_configuration_error(text):
    with refused("invalid_override"):
        parse_override(text)


NUMBERS = ("trainer.max_steps", "trainer.learning_rate", "machine.servers.count", "evaluation.seed")


@pytest.mark.parametrize("key", [*NUMBERS, "environment.args.noise", "machine.limits.ready_timeout"])
@pytest.mark.parametrize("value", ["true", "false", "nan", "inf", "-inf", '"1"', "[1]", "{a = 1}", "2020-01-01", '""'])
def test_rejects_nonfinite_numbers(key, value):
    codes = {"int_type", "float_type", "finite_number"}
    with pytest.raises(ConfigurationError) as caught:
        load_recipe("train-vlm/colors", [f"{key}={value}"])
    assert caught.value.code in codes and key in caught.exconly()


@pytest.mark.parametrize(
    "value", ["nan", "inf", "-inf", "[1.0, nan]", "{deep = [{er = inf}]}", "2020-01-01", "12:00:00"]
)
def test_rejects_unsupported_values_in_free_tables(value):
    """The arguments of a verifiers environment are any JSON."""
    args = f"environment.args={{interface = 'legacy', id = 'x', args = {{a = {value}}}, max_turns = 1}}"
    with refused("value_error", "args"):
        load_recipe("train-vlm/colors", ["environment.name=verifiers", "environment.args=", args])


def test_rejects_fingerprint_of_nonfinite_numbers():
    from pydantic import BaseModel

    from armature.components.configuration.stages import fingerprint
    from armature.components.contracts.stages import Stage, StageReport

    class Plain(BaseModel):
        rate: float | None
        more: dict[str, object]

    stage = Stage("plain", 1, Plain, (), lambda *arguments: StageReport())
    saved = fingerprint(stage, Plain(rate=None, more={}), {})
    for settings in (Plain(rate=float("nan"), more={}), Plain(rate=None, more={"a": [float("inf")]})):
        with pytest.raises(ConfigurationError):
            assert fingerprint(stage, settings, {}) != saved


@pytest.mark.parametrize(
    "values",
    [
        {"machine": {"store": "a\ud800b"}},
        {"machine": {"servers": {"environment": {"A\ud800b": "1"}}}},
        {"trainer": {"logprobs": "a\ud800b"}},
    ],
)
def test_rejects_unpaired_surrogates_everywhere(values):
    with refused("value_error", r"\ud800") as caught:
        build_recipe("train-vlm/colors", merge(load_recipe("train-vlm/colors").dump(), values), where="form")
    str(caught.value).encode()
