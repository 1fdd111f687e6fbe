"""How many rollouts a step takes, and how they are sampled."""

from __future__ import annotations

from typing import Self

from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from armature.components.contracts.settings import Settings
from armature.components.inference.settings import SamplingSettings


class RolloutSettings(Settings):
    """A step collects `groups_per_step` groups of `group_size` rollouts each."""

    groups_per_step: PositiveInt = Field(16, description="Tasks per step, each played by one group.")
    group_size: int = Field(8, ge=2, description="Rollouts of the same task, which are compared with each other.")
    sampling: SamplingSettings = Field(description="How tokens are sampled.")
    max_rounds: PositiveInt = Field(
        1,
        description="1: every group counts as it is. More: further tasks are played, groups_per_step in each round, "
        "until as many groups have rewards that differ, or after so many rounds (dynamic sampling).",
    )
    repeat_no_signal: float = Field(
        1.0,
        ge=0.01,
        le=1,
        description="Probability that an epoch has a task whose last group had equal rewards, which teach nothing; "
        "others come in its place. 1: every epoch has every task.",
    )
    max_staleness: int = Field(
        0,
        ge=0,
        le=4,
        description="0: generate and train in turn; 1: generate the next step while training this one; more, with "
        "in_flight_updates: the next steps.",
    )
    in_flight_updates: bool = Field(
        False,
        description="Weights change while episodes are being played, within an answer too, and episodes of the next "
        "max_staleness steps begin as soon as there is room. Faster where episodes are uneven; which weights sample a "
        "token depends on the time that everything takes, so a seed no longer gives one run.",
    )
    seed: NonNegativeInt = Field(0, description="Seed of the tasks' order and of every request.")

    @model_validator(mode="after")
    def _how_far_rollouts_run_ahead(self) -> Self:
        if self.in_flight_updates and self.max_staleness < 1:
            raise ValueError("in_flight_updates needs max_staleness = 1 or more: how old a step's weights may be")
        if self.max_staleness > 1 and not self.in_flight_updates:
            raise ValueError("max_staleness above 1 needs in_flight_updates = true")
        if self.in_flight_updates and self.repeat_no_signal < 1:
            raise ValueError(
                "repeat_no_signal chooses a step's tasks by the groups of the step before, and with in_flight_updates "
                "they are not there yet: leave one of the two out"
            )
        return self
