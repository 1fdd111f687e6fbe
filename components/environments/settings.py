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

from armature.components.contracts.errors import ConfigurationError
from armature.components.contracts.settings import InvalidTable, Settings
from armature.components.environments import ENVIRONMENTS


class EnvironmentSettings(Settings):
    """Together with the code's version these values determine every task."""

    name: str
    """Registered name (colors, recall, coordinates, verifiers, ...), or MODULE:CLASS of a module beside the recipe."""
    args: dict[str, Any] = Field({}, validate_default=True)
    """The environment's own settings; unknown keys are refused."""
    train_tasks: PositiveInt | None = None
    """Tasks in the training split; a dataset has at most so many, or all of its rows."""
    heldout_tasks: PositiveInt | None = None
    """Tasks in the held-out split, never trained on; as train_tasks."""
    seed: NonNegativeInt = Field(0, lt=2**31)
    """Seed of both splits' tasks."""
    evaluation_args: dict[str, Any] = Field({})
    """What of args is otherwise when an evaluation plays the tasks, so that success is measured in a published setting,
    whatever helps training: {max_invalid_actions = 0}."""

    @field_validator("args")
    @classmethod
    def _with_the_environment_s_defaults(cls, args: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
        """Complete, so that a fingerprint covers them."""
        if "name" not in info.data:
            return args
        return _checked(info.data["name"], args).model_dump(mode="json")

    @model_validator(mode="after")
    def _tasks_that_are_made_have_a_number(self) -> Self:
        for key in ("train_tasks", "heldout_tasks"):
            if getattr(self, key) is None and not getattr(ENVIRONMENTS[self.name], "knows_its_tasks", False):
                raise ValueError(f"{key}: Field required: {self.name} makes as many tasks as it is asked for")
        return self

    @model_validator(mode="after")
    def _evaluation_args_are_the_environment_s(self) -> Self:
        _checked(self.name, self.args | self.evaluation_args)
        return self

    def for_evaluation(self) -> EnvironmentSettings:
        """The same tasks, played as an evaluation plays them."""
        return self.model_copy(update={"args": self.args | self.evaluation_args, "evaluation_args": {}})


def _checked(name: str, args: dict[str, Any]) -> Settings:
    model = getattr(ENVIRONMENTS[name], "Settings", None)
    if not (isinstance(model, type) and issubclass(model, Settings)):
        raise ConfigurationError(
            f"{name!r} is not an environment: it has no class Settings",
            code="settings_class_missing",
            remedy="give it one, as docs/extending.md shows",
        )
    try:
        return model.model_validate(args)
    except ValidationError as error:
        raise InvalidTable(error, model) from error
