"""`MultimodalRLConfig`: published names and defaults, their way to the trainer, and options that it refuses."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from armature.components.contracts.errors import ConfigurationError
from armature.components.rl.config import MultimodalRLConfig
from tests.refusals import refused

PUBLISHED = {
    "max_steps": 500,
    "batch_size": 512,
    "micro_batch_size": 4,
    "mask_ratio_low": 0.1,
    "mask_ratio_high": 10.0,
    "temperature": 1.0,
    "env_id": "",
    "env_args": {},
    "rollouts_per_step": 512,
    "vllm_server_host": "0.0.0.0",
    "vllm_server_port": 8000,
    "vllm_server_timeout": 600.0,
    "generation_timeout": 600.0,
    "max_concurrent": 128,
    "sync_to_vllm_every": 1,
    "log_every_steps": 10,
    "primary_reward_key": None,
    "learning_rate": 5e-5,
}


def test_config_has_published_names_and_defaults() -> None:
    config = MultimodalRLConfig()
    assert {name: getattr(config, name) for name in PUBLISHED} == PUBLISHED
    assert config.server_url == "http://127.0.0.1:8000"


def test_options_reach_trainer_settings() -> None:
    config = MultimodalRLConfig(
        batch_size=32,
        micro_batch_size=2,
        mask_ratio_high=8.0,
        save_steps=5,
        bf16=True,
        lr_scheduler_type="cosine",
        packing=True,
        torch_compile=True,
    )
    settings = config.settings().trainer
    assert (settings.samples_per_update, settings.max_rows_per_micro_batch, settings.save_every) == (32, 2, 5)
    assert (settings.autocast, settings.lr_scheduler) == ("bf16", "cosine")
    assert settings.packing and settings.torch_compile
    assert settings.objective.name == "mask_ratio"
    assert settings.objective.mask_ratio_high == 8.0


@pytest.mark.parametrize(("rollouts", "group"), [(512, 8), (16, 8), (20, 4), (5, 1), (1, 1)])
def test_default_group_size_divides_rollouts(rollouts: int, group: int) -> None:
    assert MultimodalRLConfig(rollouts_per_step=rollouts).group_size == group


@pytest.mark.parametrize(
    ("options", "code", "place"),
    [
        ({"learning_rte": 1e-5}, "unknown_option", "'learning_rate'"),
        ({"report_to": "wandb"}, "unused_option", "report_to"),
        ({"vllm_server_group_port": 51216}, "unused_option", "vllm_server_group_port"),
        ({"rollouts_per_step": 10, "rollouts_per_example": 4}, "rollouts_not_in_groups", "rollouts_per_step (10)"),
        ({"mask_ratio_low": 2.0, "mask_ratio_high": 1.0}, "value_error", "mask_ratio_low (2.0)"),
        ({"warmup_steps": 600}, "value_error", "warmup_steps (600)"),
        ({"eval_steps": 5, "sync_to_vllm_every": 2}, "evaluates_old_weights", "sync_to_vllm_every = 2"),
        ({"eval_patience": 2}, "patience_without_evaluations", "eval_patience = 2"),
        ({"temperature": 0.0}, "greater_than", "temperature"),
        ({"temperature": 3.0}, "less_than_equal", "temperature"),
        ({"adam_beta1": 1.0}, "less_than", "adam_beta1"),
        ({"lora": {"rnk": 8}}, "extra_forbidden", "'rank'"),
        ({"aggregation": "men"}, "literal_error", "'sequence'"),
        ({"output_dir": None}, "path_type", "output_dir"),
    ],
)
def test_rejects_meaningless_options(options: dict[str, Any], code: str, place: str) -> None:
    with refused(code, place, kind=ConfigurationError):
        MultimodalRLConfig(**options)


def test_settings_import_without_torch() -> None:
    code = (
        "import sys, armature.components.rl.config, "
        "armature.components.vlm.settings, armature.components.training.service_settings, "
        "armature.components.training.client; assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
