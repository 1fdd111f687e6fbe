"""Recipes: extension, overrides, and errors that say what to do."""

from __future__ import annotations

import itertools
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
from components.contracts.machine import Machine
from components.datasets.settings import SourceSettings
from components.environments.openenv.settings import OpenEnvSettings
from components.training.processes import TrainerProcesses


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


@pytest.mark.parametrize("digest", ["7e91234567", "0123456789", "1234567890", "12e45", "1_000", "-1", "inf"])
def test_a_number_is_taken_as_it_is_written_where_a_string_is_asked_for(digest):
    recipe = load_recipe("evaluate/vlm", [f"subject.checkpoint={digest}", "inference.max_model_len=1_024"])
    assert recipe.sections["subject"].checkpoint == digest
    assert recipe.sections["inference"].max_model_len == 1024


def test_the_order_of_keys_in_a_table_changes_no_settings():
    """A fingerprint does not see it, so no result may: here the order of a policy's images."""
    cameras = {"front": "a", "wrist": "b", "above": "c"}
    orders = [dict(each) for each in itertools.permutations(cameras.items())]
    sources = [SourceSettings(path="x", tag="x", cameras=each) for each in orders]
    assert {tuple(each.cameras.items()) for each in sources} == {(("above", "c"), ("front", "a"), ("wrist", "b"))}
    played = [
        OpenEnvSettings(base_url="http://127.0.0.1:1", max_turns=1, reset={"deep": [{"one": each}]}) for each in orders
    ]
    assert len({each.model_dump_json() for each in played}) == 1


def test_an_override_without_an_equals_sign_is_refused():
    with pytest.raises(ConfigurationError, match="write --set"):
        parse_override("trainer.max_steps")


def test_an_override_without_a_value_takes_away_a_setting_or_a_section():
    changed = ["dataset.path=data/mine", "dataset.revision="]
    assert load_recipe("train-vla/molmoact2", changed).dump()["dataset"]["revision"] is None
    assert "evaluation" not in load_recipe("train-vla/tiny", ["evaluation="]).sections
    with pytest.raises(ConfigurationError, match=r"trainer.max_steps: Field required"):
        load_recipe("train-vlm/colors", ["trainer.max_steps="])


def test_merging_replaces_lists_and_scalars_whole():
    assert merge({"a": [1, 2], "b": {"c": 1, "d": 2}}, {"a": [3], "b": {"c": 4}}) == {"a": [3], "b": {"c": 4, "d": 2}}


def test_unknown_names_suggest_the_nearest():
    with pytest.raises(ConfigurationError, match=r"did you mean 'train-vlm/colors'"):
        load_recipe("train-vlm/colrs")
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


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("trainer.correction.cap=2.0", r"trainer.correction.cap is not a setting of 'none'; known: mode"),
        ("trainer.correction={mode='none', cap=2.0}", r"correction.cap is not a setting of 'none'; known: mode"),
        ("trainer.objective.mask_ratio_lo=0.1", r"of 'mask_ratio'; did you mean 'mask_ratio_low'"),
        ("trainer.objective={name='ppo', clip_hihg=0.2}", r"objective.clip_hihg .* 'ppo'; did you mean 'clip_high'"),
        ("trainer.dr_grpo_length=4", r"dr_grpo_length has no effect with aggregation token: leave it out"),
        ("trainer.aggregation=dr_grpo", r"divides by dr_grpo_length: set it"),
        ("trainer.logprobs={name='normal', chunk_tokens=8}", r"logprobs.chunk_tokens is not a setting of 'normal'"),
        ("rollouts.sampling.top_pp=1.0", r"rollouts.sampling.top_pp is not a setting; known: max_tokens, temperature"),
        ("batches.advantage={name='gigpo', norm={name='mean_norm', std_floor=1.0}}", r"norm.std_floor .* 'mean_norm'"),
        ("environment.args.nose=1.0", r"environment.args.nose is not a setting; did you mean 'noise'"),
        ("environment.args.noise=loud", r"environment.args.noise: Input should be a valid number .given 'loud'."),
        ("environment.evaluation_args={nose=1.0}", r"environment.nose is not a setting; did you mean 'noise'"),
        ("evaluation.sampling={max_tokens=4, temperature=0.0, top_k=5}", r"top_p and top_k have no effect"),
    ],
)
def test_what_has_no_effect_and_what_is_misspelled_is_refused_with_what_to_write(override, said):
    with pytest.raises(ConfigurationError, match=said):
        load_recipe("train-vlm/colors", [override])


@pytest.mark.parametrize("corrected", ["trainer.correction={mode='truncate'}", "trainer.objective={name='mask_ratio'}"])
def test_servers_in_8_bits_need_a_correction(corrected):
    given = ["trainer.objective={name='ppo'}", "inference.quantization=fp8"]
    with pytest.raises(ConfigurationError, match=r"biases every update: set trainer.correction.mode = .truncate."):
        load_recipe("train-vlm/colors", given)
    assert load_recipe("train-vlm/colors", [*given, corrected]).dump()["inference"]["quantization"] == "fp8"


def test_a_key_of_a_variant_that_the_recipe_leaves_to_its_default_can_be_set():
    key = "environment.args.games.most_receptacles"
    games = load_recipe("train-vlm/molmo2-text").dump()["environment"]["args"]["games"]
    changed = load_recipe("train-vlm/molmo2-text", [f"{key}=4"]).dump()["environment"]["args"]["games"]
    assert games["most_receptacles"] != 4 and changed == {**games, "most_receptacles": 4}
    with pytest.raises(ConfigurationError, match=r"games\.folder is not a setting of 'generated'"):
        load_recipe("train-vlm/molmo2-text", ["environment.args.games.folder=games"])


def test_several_nodes_need_a_place_to_meet():
    with pytest.raises(ConfigurationError, match=r"trainer_nodes = 2 needs trainer_interface, the private network"):
        load_recipe("train-vla/molmoact2", ["machine.trainer_nodes=2"])
    with pytest.raises(ConfigurationError, match=r"machine.trainer_interface: .*given 'eth0,eth1'"):
        load_recipe("train-vla/molmoact2", ["machine.trainer_nodes=2", "machine.trainer_interface=eth0,eth1"])
    load_recipe("train-vla/molmoact2", ["machine.trainer_nodes=2", "machine.trainer_interface=eth1"])
    with pytest.raises(ConfigurationError, match=r"trainer_rendezvous has no effect with trainer_nodes = 1"):
        load_recipe("train-vla/molmoact2", ["machine.trainer_rendezvous=nodes"])
    with pytest.raises(ConfigurationError, match=r"with trainer_nodes = 1 it is \"full\""):
        load_recipe("train-vla/molmoact2", ["machine.trainer_sharding=hybrid"])
    with pytest.raises(ConfigurationError, match=r"trainer_sharding has no effect with one rank"):
        load_recipe("train-vla/tiny", ["machine.trainer_sharding=full"])


def test_how_ranks_split_a_model():
    gpus = ["machine.trainer_processes=2", "machine.trainer_gpus=[0,1]"]
    for words, copies in ((gpus, 1), ([*gpus, "machine.trainer_sharding=none"], 2)):
        machine = load_recipe("train-vla/molmoact2", words).sections["machine"]
        assert isinstance(machine, Machine)
        processes = TrainerProcesses.of(machine)
        assert (processes.copies, processes.shards, processes.sharding is None) == (copies, 2 // copies, copies == 2)


def test_the_nodes_of_a_trainer_on_a_cluster():
    place = 'machine.cluster={address="auto", trainer={num_cpus=8, num_gpus=4}}'
    here, there = ["machine.trainer_gpus=[]", place], ["machine.trainer_processes=4", "machine.trainer_nodes=2"]
    machine = load_recipe("train-vla/molmoact2", [*here, *there]).sections["machine"]
    assert isinstance(machine, Machine)
    assert machine.joining_nodes == 0 and machine.gpus_of_trainer == (0, 1, 2, 3)
    processes = TrainerProcesses.of(machine)
    assert (processes.ranks, processes.sharding, processes.threads, processes.interface) == (8, "full", 2, None)
    for refused, said in (
        ([place, *there], "trainer_gpus names GPUs of this machine"),
        ([*here, "machine.trainer_processes=2"], "num_gpus = 4: each of the 2 ranks of a node"),
        ([*here, *there, "machine.trainer_rendezvous=nodes"], "trainer_rendezvous has no effect with cluster.trainer"),
    ):
        with pytest.raises(ConfigurationError, match=said):
            load_recipe("train-vla/molmoact2", refused)
    with pytest.raises(ConfigurationError, match=r"cluster\.trainer needs weight_transfer"):
        load_recipe(
            "train-vlm/colors", ['machine.cluster={address="auto", trainer={}}', "machine.weight_transfer=nccl"]
        )


@pytest.mark.parametrize(
    ("endpoints", "said"),
    [
        ('["10.0.0.7:8000"]', "not the base URL"),
        ('[""]', "not the base URL"),
        ('["http://10.0.0.7:8000", "http://10.0.0.7:8000/"]', "twice"),
    ],
)
def test_endpoints_are_base_urls_each_once(endpoints, said):
    with pytest.raises(ConfigurationError, match=said):
        load_recipe("train-vlm/colors", [f"machine.endpoints={endpoints}"])


@pytest.mark.parametrize(
    ("wanted", "said"),
    [
        ("resources={CPU=2}", "'CPU' is not a name"),
        ("resources={memory=2}", "'memory' is not a name"),
        ('resources={""=1}', "'' is not a name"),
        ("resources={fast=0.00001}", r"less than 0\.0001"),
        ("num_cpus=0.00001", r"less than 0\.0001"),
        ("num_gpus=1.5", r"1\.5 GPUs"),
        ("servers={resources={GPU=1}}", "'GPU' is not a name"),
        ("trainer={resources={fast=0.00001}}", r"less than 0\.0001"),
    ],
)
def test_what_ray_cannot_count_is_refused(wanted, said):
    with pytest.raises(ConfigurationError, match=said):
        load_recipe(
            "train-vlm/colors", [f'machine.cluster={{address="auto", {wanted}}}', "machine.environment_processes=2"]
        )


def test_rollout_workers_on_a_cluster_need_servers_that_they_reach():
    workers = ["machine.rollout_workers=2", 'machine.cluster={address="auto"}']
    with pytest.raises(ConfigurationError, match=r"rollout_workers on a cluster(.|\n)*endpoints or endpoints_file"):
        load_recipe("train-vlm/colors", workers)
    load_recipe("train-vlm/colors", [*workers, 'machine.endpoints=["http://10.0.0.7:8000"]'])
    with pytest.raises(ConfigurationError, match=r"cluster needs environment_processes, rollout_workers or"):
        load_recipe("train-vlm/colors", workers[1:])


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
    with pytest.raises(ConfigurationError, match=r"warm_start.learning_rate: Field required"):
        build_recipe("train-vlm/colors", values | {"warm_start": {"epochs": 1}}, "here")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"a = '\xff'", "UTF-8"),
        (b"a = " + b"[" * 100_000, "too deeply nested|not valid TOML"),
        (b"a = " + b"{a=" * 100_000, "too deeply nested|not valid TOML"),
        (b"a = " + b"9" * 10_000, "not valid TOML"),
        (b"#" * 5_000_000, "more than 4194304 bytes"),
        (b"extends = 3", "extends: .*given 3"),
        (b"extends = ['a']", "extends"),
        (b"extends = {file = 'b.toml', section = ['model']}", "extends.section is not a setting"),
        (b"extends = {sections = ['model']}", "extends.file: Field required"),
        (b"extends = {file = 'b.toml', sections = 'model'}", "extends.sections"),
        (b"extends = {file = 3}", "extends.file"),
        (b"extends = ''", "not a file"),
        (b"extends = '/dev/zero'", "not a file"),
        (b"extends = 'a\\u0000b'", "TOML config not found|null"),
        (b'extends = "' + b"a" * 5000 + b'"', "name too long|not found"),
    ],
)
def test_hostile_toml_is_an_error_of_ours(tmp_path, content, said):
    (tmp_path / "b.toml").write_text("")
    (tmp_path / "bad.toml").write_bytes(content)
    with pytest.raises(ConfigurationError, match=f"(?is){said}"):
        read_toml(tmp_path / "bad.toml")


@pytest.mark.parametrize("name", [".", "none/bad.toml", "loop.toml", "closed/bad.toml"])
def test_a_recipe_s_file_that_is_none_is_an_error_of_ours(tmp_path, name):
    (tmp_path / "loop.toml").symlink_to("loop.toml")
    with pytest.raises(ConfigurationError):
        read_toml(tmp_path / name)


@pytest.mark.parametrize(
    "text",
    [
        *("", "=", "=1", ".=1", "a.=1", ".a=1", "a..b=1", "a", " =1", "a\0b=1", "a=\0", "a=\udcff", "\udcff=1"),
        *("a" + ".a" * 100_000 + "=1", "a=" + "[" * 100_000, "a=" + "9" * 10_000, "a=1\nb=2"),
    ],
    ids=lambda text: ascii(text)[:20],
)
def test_what_is_no_override_is_an_error_of_ours(text):
    with pytest.raises(ConfigurationError):
        parse_override(text)


def test_an_override_takes_away_what_is_not_there():
    assert merge({}, parse_override("a.b.c=")) == {"a": {"b": {}}}
    with pytest.raises(ConfigurationError, match=r"warm_start.learning_rate: Field required"):
        load_recipe("train-vlm/colors", ["warm_start.epochs="])


NUMBERS = ("trainer.max_steps", "trainer.learning_rate", "machine.servers", "evaluation.seed")


@pytest.mark.parametrize("key", [*NUMBERS, "environment.args.noise", "machine.ready_timeout"])
@pytest.mark.parametrize("value", ["true", "false", "nan", "inf", "-inf", '"1"', "[1]", "{a = 1}", "2020-01-01", '""'])
def test_what_is_no_finite_number_is_none(key, value):
    with pytest.raises(ConfigurationError, match=key.rpartition(".")[2]):
        load_recipe("train-vlm/colors", [f"{key}={value}"])


@pytest.mark.parametrize("value", ["1", "0", '"true"', '"yes"', "1.0"])
def test_what_is_not_true_or_false_is_neither(value):
    with pytest.raises(ConfigurationError, match="valid boolean"):
        load_recipe("train-vlm/colors", [f"batches.skip_zero_advantage={value}"])


def test_an_integer_is_a_number():
    assert load_recipe("train-vlm/colors", ["trainer.learning_rate=1"]) == load_recipe(
        "train-vlm/colors", ["trainer.learning_rate=1.0"]
    )


@pytest.mark.parametrize(
    "value", ["nan", "inf", "-inf", "[1.0, nan]", "{deep = [{er = inf}]}", "2020-01-01", "12:00:00"]
)
def test_odd_values_in_free_tables_are_refused(value):
    """The arguments of a verifiers environment are any JSON."""
    args = f"environment.args={{interface = 'legacy', id = 'x', args = {{a = {value}}}, max_turns = 1}}"
    with pytest.raises(ConfigurationError, match="args"):
        load_recipe("train-vlm/colors", ["environment.name=verifiers", "environment.args=", args])


def test_fingerprints_of_numbers_that_json_lacks_are_refused():
    from pydantic import BaseModel

    from components.contracts.stages import Stage, StageReport
    from components.stages import fingerprint

    class Plain(BaseModel):
        rate: float | None
        more: dict[str, object]

    stage = Stage("plain", 1, Plain, (), lambda *arguments: StageReport())
    kept = fingerprint(stage, Plain(rate=None, more={}), {})
    for settings in (Plain(rate=float("nan"), more={}), Plain(rate=None, more={"a": [float("inf")]})):
        with pytest.raises(ConfigurationError, match="not a finite number"):
            assert fingerprint(stage, settings, {}) != kept


@pytest.mark.parametrize(
    "values",
    [
        {"machine": {"store": "a\ud800b"}},
        {"machine": {"server_environment": {"A\ud800b": "1"}}},
        {"trainer": {"logprobs": "a\ud800b"}},
    ],
)
def test_half_a_character_is_refused_wherever_it_is(values):
    with pytest.raises(ConfigurationError, match=r"half a character.*\\ud800") as raised:
        build_recipe("train-vlm/colors", merge(load_recipe("train-vlm/colors").dump(), values), where="form")
    str(raised.value).encode()
