"""Recipes for the released policy: settings published for other policies, and one step of them with a tiny policy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from armature.components.configuration import load_recipe
from armature.components.contracts.stages import Artifact
from armature.components.robots.rl.settings import GAE, TrainVLARLSettings
from tests.refusals import refused
from tests.robots.rl.kitchen import Kitchen, calm_policy, rollout_settings
from tests.robots.rl.test_run import train

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
"""Settings of two RLinf configurations for pi0.5 (libero_spatial_ppo, libero_10_grpo), under the names that Armature
uses."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_recipes_have_the_published_settings(name: str):
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
def test_tiny_policy_trains_a_step_with_published_settings(name: str, tmp_path: Path):
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


@pytest.mark.parametrize(
    ("overrides", "place"),
    [
        (
            "policy.action_mode=discrete training.learning_rates.action_expert=5e-5",
            "rollouts.inference_action_mode is continuous",
        ),
        ("evaluation.inference_action_mode=discrete", "evaluation.inference_action_mode is discrete"),
        ("rollouts.tasks=[0,0]", "tasks: 0, 0"),
        ("trainer.packing={max_row_tokens=600,max_row_examples=4}", "packing: "),
        ("trainer.ratio=token", "trainer.ratio token"),
        ("trainer.objective.name=gspo", "trainer.objective gspo"),
        ("rollouts.group_size=1", "rollouts.group_size is 1"),
        ("rollouts.reward.name=potential", "rollouts.reward potential"),
        ("rollouts.torch_compile=true evaluation.every=1", "evaluation.torch_compile, rollouts.torch_compile"),
        (
            "rollouts.quantization=fp8 policy.dtype=bfloat16 evaluation.every=1",
            "evaluation.quantization, rollouts.quantization",
        ),
        ("rollouts.quantization=fp8", "rollouts.quantization: 8-bit"),
        ("evaluation.quantization=fp8", "evaluation.quantization: 8-bit"),
        (
            "rollouts.quantization=fp8 policy.dtype=bfloat16 machine.trainer.processes=2 machine.trainer.gpus=[0,1]",
            "rollouts.quantization: the trainer shards",
        ),
        ("rollouts.quantization=fp8 trainer.mode=full", "trainer.mode full"),
        ("evaluation.perturbations.layout=[1] simulator.num_steps_wait=1", "simulator.num_steps_wait is 1"),
        ("rollouts.perturbations.distractors=[1] simulator.num_steps_wait=1", "simulator.num_steps_wait is 1"),
        ("evaluation.heldout_episodes=7", "heldout_episodes = 7"),
        ("policy.num_inference_steps=1", "policy.num_inference_steps is 1"),
        ("policy.enable_knowledge_insulation=true", "enable_knowledge_insulation"),
        ("trainer.learning_rates.connector=1e-4", "learning_rates.connector: "),
        (
            "training.mode=expert training.freeze_embedding=true",
            "learning_rates.vlm, learning_rates.vit, learning_rates.connector: ",
        ),
        (
            "policy.action_mode=both rollouts.inference_action_mode=discrete trainer.mode=full "
            "rollouts.noise_level=0.5",
            "learning_rates.action_expert: rollouts.inference_action_mode discrete",
        ),
        ("policy.action_mode=discrete", "learning_rates.action_expert: policy.action_mode discrete"),
    ],
)
def test_rejects_recipes_that_would_fail_after_imitation(overrides: str, place: str):
    with refused("value_error", place):
        load_recipe("train-vla-rl/tiny", overrides.split())


@pytest.mark.parametrize(
    ("override", "code"),
    [
        ("rollouts.quantization=int8", "literal_error"),
        ("rollouts.noise_level=1e-300", "greater_than_equal"),
        ("rollouts.noise_level=1e20", "less_than_equal"),
        ("trainer.seed=9223372036854775808", "less_than"),
        ("training.seed=9223372036854775808", "less_than"),
        ("policy.tiny.seed=9223372036854775808", "less_than"),
        ("evaluation.seed=4294967296", "less_than"),
    ],
)
def test_rejects_values_out_of_range(override: str, code: str):
    with refused(code, override.partition("=")[0]):
        load_recipe("train-vla-rl/tiny", [override])


def sections(rollouts: dict[str, Any], trainer: dict[str, Any]) -> dict[str, Any]:
    played = rollout_settings().model_dump() | rollouts
    return {
        "simulator": {},
        "rollouts": played,
        "trainer": {"max_steps": 3, "micro_batch_size": 1} | trainer,
        "preflight": {},
    }


DISCRETE = {"inference_action_mode": "discrete"}


@pytest.mark.parametrize(
    ("rollouts", "trainer", "code", "places"),
    [
        (DISCRETE, {}, "value_error", ["trainer.mode expert"]),
        (DISCRETE, {"mode": "full", "ratio": "dimension"}, "value_error", ["ratio dimension", "token"]),
        ({}, {"ratio": "token"}, "value_error", ["ratio token", "dimension"]),
        ({"temperature": 0.5}, {}, "value_error", ["temperature"]),
        (DISCRETE | {"noise_level": 0.7}, {"mode": "full"}, "value_error", ["noise_level"]),
        ({"max_rounds": 2}, {"advantage": {"name": "gae"}}, "value_error", ["max_rounds", "trainer.advantage gae"]),
        (DISCRETE | {"likelihood": "fpo"}, {"mode": "full"}, "value_error", ["likelihood fpo"]),
        ({"likelihood": "fpo", "noise_level": 0.7}, {}, "value_error", ["noise_level", "likelihood fpo"]),
        ({"flow_samples": 4}, {}, "value_error", ["flow_samples"]),
        ({}, {"kl_coefficient": 0.1, "mode": "full"}, "value_error", ["kl_coefficient"]),
        ({"likelihood": "fpo"}, {"kl_coefficient": 0.1}, "value_error", ["kl_coefficient", "likelihood fpo"]),
        ({"group_size": 1}, {}, "value_error", ["rollouts.group_size is 1"]),
        ({"reward": {"name": "potential"}}, {}, "value_error", ["rollouts.reward potential"]),
        ({"reward": {"name": "progress", "weight": 1.0}}, {}, "less_than", ["weight"]),
        ({"reward": {"name": "progres"}}, {}, "union_tag_invalid", ["'success', 'progress', 'potential'"]),
        ({}, {"advantage": {"name": "group_mean", "gamma": 0.9}}, "extra_forbidden", ["gamma"]),
    ],
)
def test_rejects_inconsistent_settings(rollouts: Any, trainer: Any, code: str, places: list[str]) -> None:
    with refused(code, *places):
        TrainVLARLSettings.model_validate(sections(rollouts, trainer))


@pytest.mark.parametrize("rollouts", [{"group_size": 1}, {"reward": {"name": "potential"}}], ids=["group", "reward"])
def test_gae_accepts_single_episodes_and_shaped_rewards(rollouts: dict[str, Any]) -> None:
    settings = TrainVLARLSettings.model_validate(sections(rollouts, {"advantage": {"name": "gae"}}))
    assert isinstance(settings.trainer.advantage, GAE) and settings.trainer.advantage.gae_lambda == 0.95


def test_defaults_of_advantage_and_reward() -> None:
    settings = TrainVLARLSettings.model_validate(sections({"reward": {"name": "progress"}}, {}))
    assert settings.trainer.model_dump()["advantage"] == {"name": "group_mean", "deviation": "sample"}
    assert settings.rollouts.model_dump()["reward"] == {"name": "progress", "weight": 0.5}


@pytest.mark.parametrize("recipe", ["train-vla/tiny", "train-vla-rl/tiny", "evaluate/libero"])
@pytest.mark.parametrize(
    ("overrides", "code"),
    [
        (["policy.tiny=", "policy.path=", "policy.checkpoint_path="], "policy_missing"),
        (["policy.tiny={}", "policy.path=mine"], "policy_ambiguous"),
        (["policy.tiny={}", "policy.checkpoint_path=", "policy.revision=main"], "policy_ambiguous"),
        (["policy.tiny={}", "policy.checkpoint_path=", "policy.revision=", "policy.norm_tag=a"], "policy_ambiguous"),
        (["policy.tiny.heads=5", "policy.checkpoint_path=", "policy.revision="], "invalid_tiny_sizes"),
        (
            ["policy.tiny={heads=4, key_value_heads=3}", "policy.checkpoint_path=", "policy.revision="],
            "invalid_tiny_sizes",
        ),
        (
            [
                "policy.tiny={}",
                "policy.path=",
                "policy.checkpoint_path=",
                "policy.revision=",
                "policy.chunk_size=4",
                "policy.n_action_steps=5",
            ],
            "chunk_too_short",
        ),
    ],
)
def test_contradictory_policy_is_refused_before_a_stage_runs(recipe, overrides, code):
    values = load_recipe(recipe, overrides).values
    with refused(code, "policy"):
        values.refuse_sources()
