from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
from torch import nn

from armature.components.robots.imitation.opening import parameter_groups
from tests.refusals import refused

from .settings import LORA, training_settings


@pytest.mark.parametrize(
    ("update", "factor"),
    [
        (1, 0.005),
        (199, 0.995),
        (200, 1.0),
        (12_100, 0.1 + 0.9 * 0.5),  # half way between warm-up and the end
        (6_150, 0.1 + 0.9 * (1 + math.sqrt(0.5)) / 2),  # a quarter of the way: cos(45 degrees)
        (24_000, 0.1),
        (30_000, 0.1),
    ],
)
def test_cosine_ends_at_decay_steps_for_any_length_of_run(update: int, factor: float) -> None:
    rate = rate_of(warmup_steps=200, decay_steps=24_000, max_steps=10_000)
    assert rate(update) == pytest.approx(5e-5 * factor, abs=1e-17)


def test_cosine_without_decay_steps_ends_with_the_run() -> None:
    rate = rate_of(warmup_steps=0, max_steps=100, final_lr_fraction=0.0)
    assert rate(100) == 0.0
    assert rate(50) == pytest.approx(5e-5 * 0.5)


def rate_of(**changes: Any) -> Callable[[int], float]:
    """Return the learning rate of the action expert, whose peak is 5e-5."""
    settings = training_settings(learning_rates={"action_expert": 5e-5}, **changes)
    groups = parameter_groups(nn.ModuleDict({"action_expert": nn.Linear(1, 1)}), settings)
    return next(group.rate for group in groups if group.name == "action_expert")


@pytest.mark.parametrize(
    ("changes", "code", "shown"),
    [
        ({"mode": "lora"}, "value_error", ["mode lora"]),
        ({"lora_dropout": 0.1}, "value_error", ["lora_dropout"]),
        ({"lora": LORA}, "value_error", ["mode full", "section lora"]),
        ({"warmup_steps": 5}, "value_error", ["warmup_steps (5)", "(4)"]),
        ({"heldout": {"fraction": 1.0}}, "less_than", ["heldout.fraction", 1]),
        ({"heldout": {"fraction": 0.0}}, "greater_than", ["heldout.fraction", 0]),
        ({"mode": "expert", "freeze_embedding": False}, "value_error", ["mode expert", "freeze_embedding = false"]),
        (
            {"mode": "expert", "learning_rates": {"vit": 1e-3, "vlm": 1e-3, "action_expert": 1e-3}},
            "value_error",
            ["learning_rates.vlm, learning_rates.vit", "1e-05, 5e-06"],
        ),
    ],
    ids=["lora-missing", "dropout-unused", "lora-unused", "warmup", "heldout", "no-heldout", "embedding", "rates"],
)
def test_rejects_contradictory_training_settings(changes: dict[str, object], code: str, shown: list[object]) -> None:
    with refused(code, *shown):
        training_settings(**changes)
