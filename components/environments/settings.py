"""Which environment, with which arguments, and how many tasks it makes."""

from __future__ import annotations

from typing import Any, Self

from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from components.contracts.settings import Settings
from components.environments import ENVIRONMENTS


class EnvironmentSettings(Settings):
    """Together with the code's version these values determine every task."""

    name: str = Field(description="Registered name: colors, recall, coordinates, verifiers, ...")
    args: dict[str, Any] = Field(description="The environment's own settings; unknown keys are refused.")
    train_tasks: PositiveInt = Field(description="Tasks in the training split.")
    heldout_tasks: PositiveInt = Field(description="Tasks in the held-out split, never trained on.")
    seed: NonNegativeInt = Field(lt=2**31, description="Seed of both splits' tasks.")
    evaluation_args: dict[str, Any] = Field(
        default_factory=dict,
        description="What of args is otherwise when an evaluation plays the tasks, so that success is measured in a "
        "published setting, whatever helps training: {max_dead_ends = 0}.",
    )

    @model_validator(mode="after")
    def _args_are_the_environments(self) -> Self:
        kind = ENVIRONMENTS[self.name].Settings
        kind.model_validate(self.args)
        kind.model_validate(self.args | self.evaluation_args)
        return self

    def for_evaluation(self) -> EnvironmentSettings:
        """The same tasks, played as an evaluation plays them."""
        return self.model_copy(update={"args": self.args | self.evaluation_args, "evaluation_args": {}})
