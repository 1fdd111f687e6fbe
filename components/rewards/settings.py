"""Which rewards, with which weights and arguments."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ConfigDict, Field, ValidationError, model_validator

from armature.components.contracts.settings import InvalidTable, Settings
from armature.components.rewards import REWARDS


class NamedReward(Settings):
    """What every reward is told."""

    name: str = Field(description="Registered name: exact_match, choice, number, function, ...")
    weight: float = Field(1.0, description="What the reward is multiplied by in the sum; 0: it is only recorded.")
    label: str = Field(
        "", max_length=100, description="Its name in tables and curves, for two rewards of one name; empty: the name."
    )

    @property
    def part(self) -> str:
        """The key of its values among a turn's reward parts."""
        return self.label or self.name


class RewardSettings(NamedReward):
    """A reward, and beside its name the arguments of its own settings class: complete, and none that it lacks."""

    model_config = ConfigDict(extra="allow")

    @model_validator(mode="before")
    @classmethod
    def _with_the_reward_s_own_settings(cls, values: Any) -> Any:
        name = values.get("name") if isinstance(values, Mapping) else None
        if not isinstance(name, str):
            return values
        return own_settings(name, values).model_dump(mode="json")

    def own(self) -> Any:
        """As the reward's own settings class."""
        return own_settings(self.name, self.model_dump())


def own_settings(name: str, values: Mapping[str, Any]) -> NamedReward:
    """
    Raises:
        ConfigurationError: no reward has that name, or an extra that it needs is not installed.
        InvalidTable: the values are not what its settings class takes.
    """
    model: type[NamedReward] = REWARDS[name].Settings
    try:
        return model.model_validate(dict(values))
    except ValidationError as error:
        raise InvalidTable(error, model) from error
