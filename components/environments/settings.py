"""Which environment, with which arguments, and how many tasks it makes."""

from __future__ import annotations

from typing import Any, Self

from pydantic import (
    Field,
    NonNegativeInt,
    PositiveInt,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from components.contracts.settings import InvalidTable, Settings
from components.environments import ENVIRONMENTS


class EnvironmentSettings(Settings):
    """Together with the code's version these values determine every task."""

    name: str = Field(description="Registered name: colors, recall, coordinates, verifiers, ...")
    args: dict[str, Any] = Field(
        default_factory=dict,
        validate_default=True,
        description="The environment's own settings; unknown keys are refused.",
    )
    train_tasks: PositiveInt = Field(description="Tasks in the training split.")
    heldout_tasks: PositiveInt = Field(description="Tasks in the held-out split, never trained on.")
    seed: NonNegativeInt = Field(0, lt=2**31, description="Seed of both splits' tasks.")
    evaluation_args: dict[str, Any] = Field(
        default_factory=dict,
        description="What of args is otherwise when an evaluation plays the tasks, so that success is measured in a "
        "published setting, whatever helps training: {max_invalid_actions = 0}.",
    )

    @field_validator("args")
    @classmethod
    def _with_the_environment_s_defaults(cls, args: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
        """Complete, so that a fingerprint covers them."""
        if "name" not in info.data:
            return args
        return _checked(info.data["name"], args).model_dump(mode="json")

    @model_validator(mode="after")
    def _evaluation_args_are_the_environment_s(self) -> Self:
        _checked(self.name, self.args | self.evaluation_args)
        return self

    def for_evaluation(self) -> EnvironmentSettings:
        """The same tasks, played as an evaluation plays them."""
        return self.model_copy(update={"args": self.args | self.evaluation_args, "evaluation_args": {}})


def _checked(name: str, args: dict[str, Any]) -> Settings:
    model: type[Settings] = ENVIRONMENTS[name].Settings
    try:
        return model.model_validate(args)
    except ValidationError as error:
        raise InvalidTable(error, model) from error
