"""Which tasks are played, how often, and what counts as solved."""

from __future__ import annotations

from typing import Self

from pydantic import ConfigDict, Field, NonNegativeInt, PositiveInt, field_validator, model_validator

from components.contracts.episodes import Split
from components.contracts.settings import Settings
from components.inference.settings import EvaluationSamplingSettings, ServerSettings


class EvaluationSettings(Settings):
    """Every task of the splits is played `samples_per_task` times."""

    model_config = ConfigDict(title="Evaluation")

    splits: tuple[Split, ...] = Field(
        ("heldout",),
        min_length=1,
        description="Which tasks: heldout were never trained on. The first split's numbers are the headline.",
    )
    max_tasks: NonNegativeInt = Field(0, description="Play only the first tasks of each split; 0 plays all.")
    samples_per_task: PositiveInt = Field(
        1, description="Episodes per task; more than one needs a temperature above 0."
    )
    success_reward: float = Field(1.0, description="An episode counts as solved from this reward on.")
    kind_field: str = Field("", description="Field of the tasks' payload to break accuracy down by; empty for none.")
    sampling: EvaluationSamplingSettings = Field(description="How tokens are chosen; temperature 0 is greedy.")
    seed: NonNegativeInt = Field(0, description="Seed of every request.")

    @field_validator("splits")
    @classmethod
    def _each_once(cls, splits: tuple[Split, ...]) -> tuple[Split, ...]:
        if len(set(splits)) < len(splits):
            raise ValueError(f"{', '.join(splits)}: name each split once")
        return splits

    @model_validator(mode="after")
    def _samples_differ(self) -> Self:
        if self.samples_per_task > 1 and self.sampling.temperature == 0:
            raise ValueError(
                f"samples_per_task = {self.samples_per_task} at temperature 0 would play the same episode again: "
                "set samples_per_task = 1 or a temperature above 0"
            )
        return self


class EvaluateStageSettings(Settings):
    """The sections that an evaluation's result depends on."""

    evaluation: EvaluationSettings
    inference: ServerSettings
