"""The files that say what is run agree with each other and with the code."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml
from pydantic import BaseModel

from armature import deployments
from armature.components.configuration import load_recipe, recipe_names
from armature.components.configuration.recipes import RECIPES
from armature.components.configuration.stages import STAGES
from armature.components.contracts.errors import ConfigurationError
from armature.components.contracts.settings import Settings

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("name", recipe_names())
def test_every_recipe_loads_and_has_a_description(name):
    recipe = load_recipe(name)
    assert recipe.description.endswith(".")
    for section in recipe.sections.values():
        assert type(section).model_validate(section.model_dump(mode="json")) == section


def test_promised_deployments_exist():
    promised = {
        "train-vlm/colors",
        "train-vlm/recall",
        "train-vlm/motion-tiny",
        "train-vlm/qwen3-vl",
        "train-vlm/llava",
    }
    promised |= {"train-vlm/molmo2", "train-vlm/molmo2-text", "evaluate/alfworld", "evaluate/alfworld-thor"}
    promised |= {"train-vla/molmoact2", "train-vla/molmoact2-lora", "train-vla/molmoact2-expert", "train-vla/tiny"}
    promised |= {"evaluate/libero", "demonstrations/libero-spatial"}
    assert promised | {"evaluate/vlm", "evaluate/sweep", "alfworld-games/generated"} <= set(recipe_names())


PUBLISHED_GIGPO = {
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
    "machine": {"servers.gpus": [[2, 3]]},
}
"""Settings of the published script that train-vlm/molmo2 follows, by our names. Tensor parallel 2: one server with two
GPUs."""


PUBLISHED_VLA = {
    "policy": {
        "checkpoint_path": "allenai/MolmoAct2-LIBERO",
        "action_mode": "both",
        "chunk_size": 10,
        "n_action_steps": 10,
        "setup_type": "single franka robotic arm in libero",
        "control_mode": "delta end-effector pose",
        "image_keys": ["observation.images.image", "observation.images.wrist_image"],
        "dtype": "bfloat16",
        "num_flow_timesteps": 8,
        "normalize_gripper": False,
        "normalize_language": True,
        "enable_knowledge_insulation": False,
        "mask_action_dim_padding": True,
    },
    "dataset": {"path": "allenai/MolmoAct2-LIBERO-Dataset"},
    "training": {
        "mode": "full",
        "gradient_checkpointing": True,
        "freeze_embedding": True,
        "max_steps": 10_000,
        "batch_size": 8 * 32,
        "micro_batch_size": 32,
        "learning_rates": {"vlm": 1e-5, "vit": 5e-6, "connector": 5e-6, "action_expert": 5e-5},
        "save_every": 2000,
    },
    "evaluation": {
        "suites": ["libero_10", "libero_goal", "libero_object", "libero_spatial"],
        "tasks": [],
        "episodes_per_task": 50,
        "inference_action_mode": "continuous",
        "per_episode_seed": True,
        "eval_seed": 1000,
        "seed": 1000,
    },
    "simulator": {
        "num_steps_wait": 50,
        "camera_name_mapping": {"agentview": "image", "robot0_eye_in_hand": "wrist_image"},
    },
    "machine": {"trainer.processes": 8, "trainer.loader_workers": 4},
}
"""Settings of the training and evaluation commands on LeRobot's page about the policy."""

PUBLISHED_LORA = {
    "policy": {"action_mode": "both"},
    "training": {
        "mode": "lora",
        "learning_rates": {"vlm": 5e-5, "vit": 5e-5, "connector": 5e-5, "action_expert": 5e-5},
    },
}
PUBLISHED_EXPERT = {
    "policy": {"action_mode": "continuous"},
    "training": {"mode": "expert", "learning_rates.action_expert": 5e-5},
}
PUBLISHED_CONTINUOUS = {
    "policy": {"checkpoint_path": "allenai/MolmoAct2", "action_mode": "continuous", "semantics": "head"},
    "training": {"mode": "full", "max_steps": 10_000, "warmup_steps": 200, "decay_steps": 24_000},
}
"""Settings on the same page since pull request 4249."""
PUBLISHED_EVALUATION = {name: PUBLISHED_VLA[name] for name in ("evaluation", "simulator")}
PUBLISHED = {
    "train-vlm/molmo2": PUBLISHED_GIGPO,
    "train-vla/molmoact2": PUBLISHED_VLA,
    "train-vla/molmoact2-continuous": PUBLISHED_CONTINUOUS,
    "train-vla/molmoact2-lora": PUBLISHED_LORA,
    "train-vla/molmoact2-expert": PUBLISHED_EXPERT,
    "evaluate/libero": PUBLISHED_EVALUATION,
}


@pytest.mark.parametrize(("name", "section"), [(name, section) for name in PUBLISHED for section in PUBLISHED[name]])
def test_recipes_have_the_published_settings(name, section):
    values = load_recipe(name).dump()[section]
    for key, expected in PUBLISHED[name][section].items():
        result = values
        for part in key.split("."):
            result = result[part]
        assert result == expected, key


def extended(file: Path) -> set[Path]:
    """Return the recipe file, and the files that it extends directly or indirectly."""
    base = tomllib.loads(file.read_text()).get("extends")
    return {file} | (extended((file.parent / base).resolve()) if base else set())


def settings_files(annotation: Any) -> set[str]:
    """Return the files that define the settings classes in the type `annotation`, and the base classes of these."""
    result = set()
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        classes = annotation.__mro__[: annotation.__mro__.index(Settings)]
        result = {each.__module__.removeprefix("armature.").replace(".", "/") + ".py" for each in classes}
        parts = [field.annotation for field in annotation.model_fields.values()]
    else:
        parts = list(get_args(annotation))
    return result.union(*map(settings_files, parts))


def test_default_machine_section_is_left_out_of_parameters():
    names = "quantile-stats/folder", "train-vlm/colors"
    written = {name: deployments.deployment(load_recipe(name))["parameters"] for name in names}
    assert "machine" not in written["quantile-stats/folder"]
    assert written["train-vlm/colors"]["machine"]["threads"] == 1


def test_dvc_stages_depend_on_all_files_of_their_settings():
    """Values stand in the recipe, the files that it extends, and the settings classes."""
    stages = yaml.safe_load((REPOSITORY / "dvc.yaml").read_text())["stages"]
    assert set(stages) <= set(STAGES)
    for name, stage in stages.items():
        command, *_ = [stage["cmd"]] if isinstance(stage["cmd"], str) else stage["cmd"]
        registered, words = STAGES[name], command.split()
        inputs = {after.partition("=")[0] for before, after in pairwise(words) if before == "--input"}
        assert inputs == set(registered.inputs)
        recipe = REPOSITORY / words[words.index("--config") + 1]
        assert {REPOSITORY / file for each in stage["params"] for file in each} == extended(recipe)
        assert settings_files(registered.settings) <= set(stage["deps"]), name


@pytest.mark.parametrize("name", [name for name in sorted(RECIPES) if not name.startswith("evaluate/libero")])
def test_rejects_empty_recipe(name):
    from armature.components.configuration import build_recipe

    with pytest.raises(ConfigurationError) as caught:
        build_recipe(name if "/" in name else f"{name}/x", {}, where="nowhere")
    assert caught.value.where == "nowhere"


def test_import_layers_hold():
    """The contracts are in pyproject.toml, [tool.importlinter]."""
    done = subprocess.run(
        [Path(sys.executable).with_name("lint-imports"), "--no-cache"], cwd=REPOSITORY, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-3000:]
