"""Settings that choose an environment, its arguments and the number of its tasks."""

from __future__ import annotations

from typing import Any, Self

from pydantic import (
    Field,
    NonNegativeInt,
    PositiveFloat,
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
    """An environment's name, arguments, task counts and seed. With the code's version they determine every task.

    Example:
        >>> settings = EnvironmentSettings(name="colors", args={"image_size": 28}, train_tasks=64, heldout_tasks=16)
        >>> settings.args["image_size"], settings.args["noise"]  # defaults are filled in
        (28, 16.0)
    """

    name: str
    """Registered name (colors, recall, coordinates, verifiers, ...), or MODULE:CLASS for a class in a file beside the
    recipe."""
    args: dict[str, Any] = Field({}, validate_default=True)
    """Settings of that environment; an unknown key is an error."""
    train_tasks: PositiveInt | None = None
    """Number of tasks in the training split. For a dataset this is an upper limit; unset means all of its rows."""
    heldout_tasks: PositiveInt | None = None
    """Number of tasks in the held-out split, which is never trained on. For a dataset an upper limit, like
    train_tasks."""
    seed: NonNegativeInt = Field(0, lt=2**31)
    """Seed from which the tasks of both splits are made."""
    evaluation_args: dict[str, Any] = Field({})
    """Entries of args to replace when an evaluation plays the tasks, to measure success in the published setting, for
    example {max_invalid_actions = 0}."""
    tools: tuple[str, ...] = ()
    """Tools that the model can call: zoom, crop, rotate, calculator, python, or MODULE:FUNCTION for a typed function in
    a file beside the recipe."""
    max_tool_calls: PositiveInt = 4
    """Number of calls in an episode. A turn with calls is not one of the environment's turns. After them, a turn with
    calls is the answer."""
    tool_timeout: PositiveFloat = Field(30.0, le=3600)
    """Seconds that one call of a tool may take. If it takes longer, the model is shown an error."""

    @field_validator("args")
    @classmethod
    def _fill_in_defaults(cls, args: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
        """Add the environment's defaults to the arguments, so that fingerprints cover them too."""
        if "name" not in info.data:
            return args
        return _checked(info.data["name"], args).model_dump(mode="json")

    @model_validator(mode="after")
    def _require_task_counts(self) -> Self:
        for key in ("train_tasks", "heldout_tasks"):
            if getattr(self, key) is None and not getattr(ENVIRONMENTS[self.name], "knows_its_tasks", False):
                raise ValueError(f"{key}: Field required: {self.name} can make any number of tasks")
        return self

    @model_validator(mode="after")
    def _check_evaluation_args(self) -> Self:
        _checked(self.name, self.args | self.evaluation_args)
        return self

    def for_evaluation(self) -> EnvironmentSettings:
        """Return the settings with `evaluation_args` merged into `args`: the same tasks, played as in evaluation."""
        return self.model_copy(update={"args": self.args | self.evaluation_args, "evaluation_args": {}})


def _checked(name: str, args: dict[str, Any]) -> Settings:
    model = getattr(ENVIRONMENTS[name], "Settings", None)
    if not (isinstance(model, type) and issubclass(model, Settings)):
        raise ConfigurationError(
            f"{name!r} is not an environment: it has no class Settings",
            code="settings_class_missing",
            remedy="give the class an attribute Settings, as docs/extending.md shows",
        )
    try:
        return model.model_validate(args)
    except ValidationError as error:
        raise InvalidTable(error, model) from error
