"""Rewards as a recipe writes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from components.configuration import explain
from components.contracts.errors import ConfigurationError
from components.contracts.settings import Settings
from components.rewards.make import make_rewards
from components.rewards.settings import RewardSettings


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
    ("values", "said"),
    [
        ({"ignore_cas": True}, "rewards.0.ignore_cas is not a setting; did you mean 'ignore_case'?"),
        ({"wieght": 2.0}, "rewards.0.wieght is not a setting; did you mean 'weight'?"),
        ({"weight": "2"}, "rewards.0.weight: Input should be a valid number (given '2')"),
        ({"extract": "(a+)+"}, "rewards.0.extract: String should match"),
    ],
)
def test_what_is_wrong_is_said_with_its_key(values: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError) as error:
        Holder.model_validate({"rewards": [{"name": "exact_match", **values}]})
    assert said in explain(error.value, "section", Holder)


def test_an_unknown_reward_is_refused_with_the_nearest_one() -> None:
    with pytest.raises(ConfigurationError, match="did you mean 'exact_match'"):
        RewardSettings.model_validate({"name": "exact_mach"})


def test_a_name_is_required() -> None:
    with pytest.raises(ValidationError, match="name"):
        RewardSettings.model_validate({"weight": 1.0})


def test_labels_tell_rewards_of_one_name_apart() -> None:
    one = RewardSettings(name="exact_match", weight=0.5)
    with pytest.raises(ConfigurationError, match="2 rewards are called 'exact_match'"):
        make_rewards([one, one], folder=Path())
    other = RewardSettings.model_validate({"name": "exact_match", "label": "strict", "ignore_case": False})
    assert make_rewards([one, other], folder=Path()).weights == {"exact_match": 0.5, "strict": 1.0}


def test_no_reward_at_all_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="no reward is named"):
        make_rewards([], folder=Path())
