"""How many rollouts a step takes, and how they are sampled."""

from __future__ import annotations

from pydantic import Field, NonNegativeInt, PositiveInt

from components.contracts.settings import Settings
from components.inference.settings import SamplingSettings


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
        0, ge=0, le=1, description="0: generate and train in turn; 1: generate the next step while training this one."
    )
    seed: NonNegativeInt = Field(0, description="Seed of the tasks' order and of every request.")
