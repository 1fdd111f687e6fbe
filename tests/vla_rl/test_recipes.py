"""Recipes for the released policy: the settings that were published for others, and a step of them on a tiny policy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from components.configuration import load_recipe
from components.contracts.errors import ConfigurationError
from components.contracts.stages import Artifact
from components.vla_rl.settings import TrainVLARLSettings
from tests.vla_rl.kitchen import Kitchen, calm_policy
from tests.vla_rl.test_run import train

PUBLISHED: dict[str, dict[str, Any]] = {
    "molmoact2-spatial": {
        "rollouts": {"suite": "libero_spatial", "group_size": 1, "max_steps": 240, "noise_level": 0.5},
        "trainer": {"epochs": 1, "samples_per_update": 2048, "kl_coefficient": 0.0, "mode": "expert", "ratio": "chunk"},
        "advantage": {
            "name": "gae",
            "gamma": 0.99,
            "gae_lambda": 0.95,
            "value_lr": 1e-4,
            "value_clip": 0.2,
            "huber_delta": 10.0,
        },
    },
    "molmoact2-long": {
        "rollouts": {"suite": "libero_10", "group_size": 8, "max_steps": 480, "noise_level": 0.5},
        "trainer": {"epochs": 4, "samples_per_update": 2048, "kl_coefficient": 0.0, "mode": "expert", "ratio": "chunk"},
        "advantage": {"name": "group_mean"},
    },
}
"""Of RLinf's configurations for pi0.5 (libero_spatial_ppo, libero_10_grpo), under our names."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_published_settings(name: str):
    settings = load_recipe(f"train-vla-rl/{name}").settings_for(TrainVLARLSettings)
    assert isinstance(settings, TrainVLARLSettings)
    rollouts, trainer = settings.rollouts, settings.trainer
    published = PUBLISHED[name]
    assert rollouts.groups_per_step * rollouts.group_size == 512
    assert {key: getattr(rollouts, key) for key in published["rollouts"]} == published["rollouts"]
    assert {key: getattr(trainer, key) for key in published["trainer"]} == published["trainer"]
    assert trainer.advantage.model_dump().items() >= published["advantage"].items()
    objective = trainer.objective.model_dump()
    assert objective == {"name": "ppo", "clip_low": 0.2, "clip_high": 0.2, "dual_clip": 3.0}
    assert trainer.learning_rates.action_expert == 5e-6 and trainer.final_lr_fraction == 1.0


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_tiny_policy_takes_a_step_of_them(name: str, tmp_path: Path):
    recipe = load_recipe(f"train-vla-rl/{name}")
    small = {
        "rollouts": {"tasks": (0, 2), "initial_states": (0, 3), "max_steps": 8, "batch": 1, "rows_per_pass": 1},
        "trainer": {"max_steps": 1, "micro_batch_size": 8},
    }
    small["rollouts"] |= {"groups_per_step": recipe.dump()["rollouts"]["groups_per_step"] // 16, "torch_compile": False}
    small["trainer"] |= {"torch_compile": False}
    sections = ("simulator", "rollouts", "trainer", "preflight")
    values = {key: recipe.dump()[key] | small.get(key, {}) for key in sections}
    calm_policy(tmp_path / "policy")
    start = Artifact(kind="policy", path=tmp_path / "policy", digest="0")
    run = train(tmp_path, start, [Kitchen()], TrainVLARLSettings.model_validate(values))
    (row,) = run.history.read()
    assert row["rollouts/planned"] == 32 and row["updates"] == values["trainer"]["epochs"] and row["grad_norm"] > 0
    assert ("value/loss" in row) == (name == "molmoact2-spatial")


RATE, DISCRETE = "training.learning_rates.action_expert=5e-5", "rollouts.inference_action_mode=discrete"


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["policy.action_mode=discrete", RATE], "rollouts.inference_action_mode is continuous"),
        (["evaluation.inference_action_mode=discrete"], "evaluation.inference_action_mode is discrete"),
        (["rollouts.tasks=[0, 0]"], "tasks: 0, 0: name each once"),
        (["trainer.packing={max_row_tokens=600,max_row_examples=4}"], "micro_batch_size 1"),
        (["trainer.ratio=token"], "continuous actions have a dimension"),
        (["trainer.objective.name=gspo"], 'set trainer.ratio to "dimension"'),
        (["rollouts.group_size=1"], "take 2 at least"),
        (["rollouts.reward.name=potential"], "take the reward progress"),
        (["rollouts.torch_compile=true", "evaluation.every=1"], "set both or neither"),
        (["rollouts.quantization=fp8", "policy.dtype=bfloat16", "evaluation.every=1"], "one policy plays both"),
        (["rollouts.quantization=fp8"], "rollouts.quantization: 8-bit products .* policy.dtype is float32"),
        (["evaluation.quantization=fp8"], "evaluation.quantization: 8-bit products .* policy.dtype is float32"),
        (
            [
                "rollouts.quantization=fp8",
                "policy.dtype=bfloat16",
                "machine.trainer_processes=2",
                "machine.trainer_gpus=[0, 1]",
            ],
            "share one policy, and no layer of it computes in 8 bits",
        ),
        (["rollouts.quantization=fp8", "trainer.mode=full"], "trains the VLM, in 16 bits, so that no ratio is 1"),
        (["rollouts.quantization=int8"], "rollouts.quantization"),
        (["evaluation.perturbations.layout=[1]", "simulator.num_steps_wait=1"], "wait longer"),
        (["evaluation.panel_episodes=7"], "leave panel_episodes out"),
        (["policy.num_inference_steps=1"], "set it to 4 or more"),
        (["policy.enable_knowledge_insulation=true"], "no gradient to the VLM, which mode full is to train"),
        (["rollouts.noise_level=1e-300"], "rollouts.noise_level"),
        (["rollouts.noise_level=1e20"], "rollouts.noise_level"),
        (["trainer.learning_rates.connector=1e-4"], "learning_rates.connector: mode expert trains .*leave it out"),
        (
            ["training.mode=expert", "training.freeze_embedding=true"],
            "learning_rates.vlm, learning_rates.vit, learning_rates.connector: mode expert",
        ),
        (
            ["policy.action_mode=both", DISCRETE, "rollouts.noise_level=0.5", "trainer.mode=full"],
            "learning_rates.action_expert: rollouts.inference_action_mode discrete",
        ),
        (["policy.action_mode=discrete"], "learning_rates.action_expert: policy.action_mode discrete"),
        (["trainer.seed=9223372036854775808"], "trainer.seed"),
        (["training.seed=9223372036854775808"], "training.seed"),
        (["policy.tiny.seed=9223372036854775808"], "policy.tiny.seed"),
        (["evaluation.seed=4294967296"], "evaluation.seed"),
    ],
)
def test_what_would_fail_after_the_imitation_is_refused(overrides: list[str], said: str):
    with pytest.raises(ConfigurationError, match=said):
        load_recipe("train-vla-rl/tiny", overrides)
