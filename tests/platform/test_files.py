"""The files that say what is run agree with each other and with the code."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from armature import deployments
from components.configuration import SECTIONS, load_recipe, recipe_from_file, recipe_names
from components.contracts.errors import ConfigurationError
from components.stages import STAGES

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("name", recipe_names())
def test_every_recipe_loads_and_says_what_it_is(name: str):
    recipe = load_recipe(name)
    assert recipe.description.endswith(".")
    for section in recipe.sections.values():
        assert type(section).model_validate(section.model_dump(mode="json")) == section


def test_the_promised_deployments_are_there():
    promised = {"train-vlm/colors", "train-vlm/recall", "train-vlm/qwen3-vl", "train-vlm/llava"}
    promised |= {"train-vlm/molmo2", "train-vlm/molmo2-text", "evaluate/alfworld", "evaluate/alfworld-thor"}
    assert promised | {"evaluate/vlm", "evaluate/sweep", "alfworld-games/generated"} <= set(recipe_names())


PUBLISHED = {
    "model": {"source": "allenai/Molmo2-4B", "freeze": [], "lora": None, "gradient_checkpointing": True},
    "rollouts": {"groups_per_step": 16, "group_size": 8, "sampling.temperature": 1.0, "sampling.max_tokens": 512},
    "inference": {"max_model_len": 2048 + 512},
    "batches": {
        "advantage.name": "gigpo",
        "advantage.gamma": 0.95,
        "advantage.step_weight": 1.0,
        "advantage.norm.name": "mean_std_norm",
        "penalty.format": 0.1,
        "penalty.inadmissible": 0.0,
    },
    "trainer": {
        "learning_rate": 3e-6,
        "max_steps": 150,
        "kl_coefficient": 0.0,
        "entropy_coefficient": 0.001,
        "samples_per_update": 256,
        "max_rows_per_micro_batch": 32,
        "objective.clip_low": 0.2,
        "objective.clip_high": 0.2,
        "objective.dual_clip": 3.0,
        "aggregation": "token",
    },
    "evaluation": {"sampling.temperature": 0.4, "samples_per_task": 1, "max_tasks": 0, "splits": ["heldout"]},
    "environment": {
        "name": "alfworld/thor",
        "seed": 0,
        "args.width": 300,
        "args.height": 300,
        "args.max_turns": 50,
        "args.prompt.history_length": 2,
        "args.reward.won_weight": 10.0,
    },
    "machine": {"server_gpus": [[2, 3]]},
}
"""Of the script that train-vlm/molmo2 follows, under our names; tensor parallel 2 is two GPUs of one server."""


@pytest.mark.parametrize("section", PUBLISHED)
def test_molmo2_has_the_published_settings(section: str):
    values = load_recipe("train-vlm/molmo2").dump()[section]
    for key, expected in PUBLISHED[section].items():
        found = values
        for part in key.split("."):
            found = found[part]
        assert found == expected, key


def test_prefect_yaml_says_what_the_recipes_say(tmp_path: Path):
    deployments.check(REPOSITORY / "prefect.yaml")
    drifted = tmp_path / "prefect.yaml"
    drifted.write_text((REPOSITORY / "prefect.yaml").read_text().replace("max_steps: 60", "max_steps: 61"))
    with pytest.raises(ConfigurationError, match="armature deployments write"):
        deployments.check(drifted)


def test_dvc_stages_are_registered_stages_with_their_inputs_and_sections():
    stages = yaml.safe_load((REPOSITORY / "dvc.yaml").read_text())["stages"]
    assert set(stages) <= set(STAGES)
    for name, stage in stages.items():
        registered = STAGES[name]
        inputs = {part.partition("=")[0] for part in stage["cmd"].split("--input ")[1:]}
        assert inputs == set(registered.inputs)
        ((file, sections),) = stage["params"][0].items()
        recipe = recipe_from_file(REPOSITORY / file, "train-vlm/colors")
        single = [key for key, section in recipe.sections.items() if type(section) is registered.settings]
        assert set(sections) == set(single or registered.settings.model_fields)


def test_unknown_keys_are_refused_with_the_nearest_known_one():
    with pytest.raises(ConfigurationError, match="learning_rat is not a setting; did you mean 'learning_rate'"):
        load_recipe("train-vlm/colors", ["trainer.learning_rat=1.0"])
    with pytest.raises(ConfigurationError, match="train-vlm/colors"):
        load_recipe("train-vlm/colours")


@pytest.mark.parametrize("name", SECTIONS)
def test_a_recipe_without_a_section_is_refused(name: str):
    from components.configuration import build_recipe

    with pytest.raises(ConfigurationError, match="Field required"):
        build_recipe(name if "/" in name else f"{name}/x", {}, where="nowhere")


def test_layers():
    """The contracts are in pyproject.toml, [tool.importlinter]."""
    done = subprocess.run(
        [Path(sys.executable).with_name("lint-imports"), "--no-cache"], cwd=REPOSITORY, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-3000:]
