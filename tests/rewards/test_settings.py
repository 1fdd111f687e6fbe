"""Rewards as a recipe writes them, and as docs/rewards.md names them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from armature.components.configuration.problems import code_of, explain
from armature.components.contracts.errors import RolloutFailed
from armature.components.contracts.settings import Settings
from armature.components.rewards import REWARDS
from armature.components.rewards.make import make_rewards
from armature.components.rewards.reward import NamedReward, RewardSettings
from tests.refusals import refused


class Holder(Settings):
    rewards: tuple[RewardSettings, ...]


def test_settings_are_complete_and_survive_json() -> None:
    made = RewardSettings.model_validate({"name": "exact_match", "ignore_case": False})
    dumped = made.model_dump(mode="json")
    assert dumped["ignore_case"] is False and dumped["ignore_punctuation"] is True and dumped["weight"] == 1.0
    held = Holder.model_validate({"rewards": [dumped]})
    assert held.model_dump(mode="json") == {"rewards": [dumped]}
    assert Holder.model_validate(held.model_dump(mode="json")) == held


@pytest.mark.parametrize(
    ("values", "code", "shown"),
    [
        ({"ignore_cas": True}, "extra_forbidden", ["rewards.0.ignore_cas ", "'ignore_case'"]),
        ({"wieght": 2.0}, "extra_forbidden", ["rewards.0.wieght ", "'weight'"]),
        ({"extract": "(a+)+"}, "string_pattern_mismatch", ["rewards.0.extract: "]),
    ],
)
def test_error_for_invalid_setting_names_the_setting(values: dict[str, Any], code: str, shown: list[str]) -> None:
    with pytest.raises(ValidationError) as error:
        Holder.model_validate({"rewards": [{"name": "exact_match", **values}]})
    explained = explain(error.value, "section", Holder)
    assert code_of(error.value) == code and all(value in explained for value in shown)


def test_rejects_unknown_reward_and_suggests_nearest() -> None:
    with refused("unknown_name", "'exact_match'"):
        RewardSettings.model_validate({"name": "exact_mach"})


def test_labels_distinguish_rewards_with_equal_names() -> None:
    one = RewardSettings(name="exact_match", weight=0.5)
    with refused("duplicate_reward", 2, "'exact_match'"):
        make_rewards([one, one], folder=Path())
    other = RewardSettings.model_validate({"name": "exact_match", "label": "strict", "ignore_case": False})
    assert make_rewards([one, other], folder=Path()).weights == {"exact_match": 0.5, "strict": 1.0}


def test_rejects_recipe_without_rewards() -> None:
    with refused("reward_missing"):
        make_rewards([], folder=Path())


PAGE = (Path(__file__).resolve().parents[2] / "docs/rewards.md").read_text()


def test_documentation_lists_every_reward_and_argument() -> None:
    included = PAGE.partition("## Included")[2].partition("\n## ")[0]
    rows = {row.split("`")[1]: row for row in included.splitlines() if row.startswith("| `")}
    rows["judge"] += PAGE.partition("## A judge")[2]
    assert set(rows) == set(REWARDS)
    for name, row in rows.items():
        ours = set(REWARDS[name].Settings.model_fields) - set(NamedReward.model_fields)
        assert ours <= set(re.findall(r"`(\w+)`", row)), name


def test_documentation_explains_every_failure_reason() -> None:
    reasons = set(re.findall(r"\b(?:reward|judge)_\w+", str(RolloutFailed.__doc__)))
    assert len(reasons) == 8
    assert {reason for reason in reasons if f"`{reason}`" not in PAGE} == set()
