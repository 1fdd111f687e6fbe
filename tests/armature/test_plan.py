"""`armature plan`: its table, what it refuses; and the memory that `armature check` reports."""

from __future__ import annotations

import json

import pytest

from armature.components.configuration import load_recipe
from armature.components.vlm.memory import GIB
from armature.plan import memory_lines, memory_of, plan_recipe
from benchmarks.model_sizes import config_of
from benchmarks.policy_case import RELEASED
from tests.refusals import refused

COLORS, ROBOT = "train-vlm/colors", "train-vla-rl/spatial-small"


def rows(name: str, *changes: str, gpus: tuple[int, ...] = (2,), assume: tuple[str, ...] = ()) -> list[list[str]]:
    """Return the rows of the table that `armature plan` prints for a recipe, as lists of cells, without the header."""
    lines = list(plan_recipe(load_recipe(name, changes), gpus, "h100", assume))
    return [line.split() for line in lines[3 : lines.index("", 2)]]


def test_plan_has_a_row_for_each_number_of_gpus():
    alone, *planned = rows(COLORS, "rollouts.groups_per_step=4", gpus=(1, 2, 4))
    assert [row[0] for row in planned] == ["2", "4"] and alone[0] == "1"  # which hold no server and trainer
    assert planned[0][1:3] == ["1", "1"]
    assert [row[0] for row in rows(ROBOT, gpus=(1, 8))] == ["1", "8"]


def test_plan_prints_assumptions_with_their_source():
    (usual,), (slow,) = rows(COLORS), rows(COLORS, assume=("environment_seconds=60", "turns=2.0"))
    assert float(slow[5]) > 2 * 60 > float(usual[5])
    lines = list(plan_recipe(load_recipe(ROBOT), (1,), "h200", ("action_seconds=0.5",)))
    (changed,) = (line for line in lines if line.split()[:1] == ["action_seconds"])
    assert changed.split()[1] == "0.5" and "measured" in changed


@pytest.mark.parametrize(
    ("name", "changes", "gpu", "assume", "code"),
    [
        pytest.param(COLORS, (), "h1000", (), "gpu_unknown", id="gpu"),
        pytest.param(COLORS, (), "h100", ("turnz=1",), "extra_forbidden", id="assumption"),
        pytest.param("train-vla/tiny", (), "h100", (), "nothing_to_plan", id="flow"),
        pytest.param(
            COLORS, ("model.source=./nowhere", "model.tiny="), "h100", (), "foreign_file_unreadable", id="model"
        ),
        pytest.param(
            COLORS, ("trainer.max_tokens_per_micro_batch=2000000000",), "h100", (), "trainer_does_not_fit", id="rank"
        ),
    ],
)
def test_rejects_recipes_that_cannot_be_planned(name, changes, gpu, assume, code):
    with refused(code):
        list(plan_recipe(load_recipe(name, changes), (2,), gpu, assume))


def test_memory_of_a_language_recipe_is_known_without_a_gpu(tmp_path):
    """LoRA on Qwen2.5-VL-7B and its server, each with 15.4 GiB of weights, on one GPU: see docs/models.md."""
    config_of("Qwen/Qwen2.5-VL-7B-Instruct").save_pretrained(tmp_path)
    recipe = load_recipe("train-vlm/geometry3k-7b", (f"model.source={tmp_path}", "model.revision="))
    memory = memory_of(recipe)
    assert memory is not None and memory.together and memory.on_gpu
    assert round(sum(memory.trainer.values()) / GIB, 1) == 24.8 and round(memory.server["weights"] / GIB, 1) == 15.4
    assert memory.fits(80e9) and not memory.fits(48e9)
    assert "fits" in memory_lines(recipe, "h100")[-1] and "80 GB" in memory_lines(recipe, None)[-1]


@pytest.mark.parametrize(
    ("name", "trains", "plays", "smallest"),
    [
        ("train-vla-rl/molmoact2-spatial", True, True, 48e9),
        ("train-vla/molmoact2", True, True, 48e9),
        ("train-vla/own-robot", True, False, 48e9),
        ("evaluate/libero", False, True, 24e9),
        ("evaluate/libero-sweep", False, True, 24e9),
    ],
)
def test_memory_of_a_robot_recipe_is_known_without_a_gpu(name, trains, plays, smallest, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(RELEASED))
    policy = "sweep.policies.molmoact2" if name.endswith("sweep") else "policy"
    recipe = load_recipe(name, (f"{policy}.checkpoint_path={tmp_path}", f"{policy}.revision="))
    memory = memory_of(recipe)
    assert memory is not None and (bool(memory.trainer), bool(memory.server)) == (trains, plays)
    assert memory.fits(smallest) and not memory.fits(smallest / 2)


def test_unknown_memory_does_not_end_the_check():
    (line,) = memory_lines(load_recipe(COLORS, ("model.source=./nowhere", "model.tiny=")), None)
    assert "unknown" in line
    assert memory_lines(load_recipe("quantile-stats/folder"), None) == []


@pytest.mark.parametrize("name", ["80GB", "80", "24gib", "0GiB", "-1GiB", "1.5GiB"])
def test_rejects_sizes_of_gpus_that_are_not_whole_gib(name):
    with refused("gpu_unknown", "--gpu"):
        memory_lines(load_recipe(COLORS, ("model.source=./nowhere", "model.tiny=")), name)
