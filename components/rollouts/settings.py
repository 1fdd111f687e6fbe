"""How many rollouts a step takes, how they are sampled, and how they become training samples. Torch-free."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import ConfigDict, Field, NonNegativeFloat, NonNegativeInt, PositiveInt, model_validator

from armature.components.contracts.settings import Settings
from armature.components.inference.settings import SamplingSettings

# How many rollouts a step takes, and how they are sampled.


class RolloutSettings(Settings):
    """A step collects `groups_per_step` groups of `group_size` rollouts each."""

    groups_per_step: PositiveInt = 16
    """Tasks per step, each played by one group."""
    group_size: int = Field(8, ge=2)
    """Rollouts of the same task, which are compared with each other."""
    sampling: SamplingSettings
    """How tokens are sampled."""
    max_rounds: PositiveInt = 1
    """1: every group counts as it is. More: further tasks are played, groups_per_step in each round, until as many
    groups have rewards that differ, or after so many rounds (dynamic sampling)."""
    repeat_no_signal: float = Field(1.0, ge=0.01, le=1)
    """Probability that an epoch has a task whose last group had equal rewards, which teach nothing; others come in its
    place. 1: every epoch has every task."""
    max_staleness: int = Field(0, ge=0, le=4)
    """0: generate and train in turn; 1: generate the next step while training this one; more, with in_flight_updates:
    the next steps."""
    in_flight_updates: bool = False
    """Weights change while episodes are being played, within an answer too, and episodes of the next max_staleness
    steps begin as soon as there is room. Faster where episodes are uneven; which weights sample a token depends on the
    time that everything takes, so a seed no longer gives one run."""
    seed: NonNegativeInt = 0
    """Seed of the tasks' order and of every request."""

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


# How rollouts become training samples. Torch-free.

Deviation = Literal["sample", "population"]
DEVIATION = (
    "Standard deviation of n numbers: sample divides their squares by n - 1, as TRL and verl do, population by n."
)


class GroupMean(Settings):
    """A trajectory is as good as it is better than the mean of its group: GRPO, Dr. GRPO, DAPO, GSPO."""

    name: Literal["group_mean"]
    """Which advantage: group_mean."""
    scale: Literal["group_std", "batch_std", "none"] = "group_std"
    """What centered rewards are divided by; none is Dr. GRPO's choice."""
    deviation: Deviation = Field("sample", description=DEVIATION)

    @model_validator(mode="after")
    def _deviation_has_an_effect(self) -> GroupMean:
        if self.scale == "none" and self.deviation != "sample":
            raise ValueError("scale none divides by no deviation: leave deviation out")
        return self


class RLOO(Settings):
    """A trajectory is as good as it is better than the mean of the others in its group."""

    name: Literal["rloo"]
    """Which advantage: rloo."""


class MeanNorm(Settings):
    """Scores less their mean."""

    name: Literal["mean_norm"]
    """Which normalization: mean_norm."""


class MeanStdNorm(Settings):
    """Scores less their mean, over their standard deviation."""

    name: Literal["mean_std_norm"]
    """Which normalization: mean_std_norm."""
    deviation: Deviation = Field("sample", description=DEVIATION)
    std_floor: NonNegativeFloat = 0.0
    """Standard deviations below this count as this, in units of reward: without a floor the small penalty of one
    unreadable answer becomes the largest advantage where all have failed."""


class ExactAnchors(Settings):
    """Two turns are at the same state where their observations are equal."""

    name: Literal["exact"]
    """Which states are the same: exact."""


class AdmissibleAnchors(Settings):
    """Two turns are at the same state where their observations and their admissible actions are equal."""

    name: Literal["admissible"]
    """Which states are the same: admissible."""


class SimilarAnchors(Settings):
    """Two turns are at the same state where their observations are nearly the same text."""

    name: Literal["similar"]
    """Which states are the same: similar."""
    threshold: float = Field(0.95, gt=0, lt=1)
    """Least ratio of equal characters, as difflib counts them."""


class GiGPO(Settings):
    """The trajectory against its group, and each turn against the turns that began at the same state."""

    name: Literal["gigpo"]
    """Which advantage: gigpo."""
    gamma: float = Field(0.95, ge=0, le=1)
    """Discount per turn of the return that turns are compared by."""
    step_weight: NonNegativeFloat = 1.0
    """Weight of the turn's advantage beside the trajectory's."""
    statistics: Literal["trajectories", "rows"] = "trajectories"
    """What counts once in a group's mean and deviation: a trajectory (the paper) or a turn (its code), where long
    trajectories weigh more."""
    norm: MeanNorm | MeanStdNorm = Field(MeanStdNorm(name="mean_std_norm"), discriminator="name")
    """What advantages are measured in."""
    anchor: ExactAnchors | AdmissibleAnchors | SimilarAnchors = Field(ExactAnchors(name="exact"), discriminator="name")
    """When two turns of a group are at the same state."""


Advantage = Annotated[GroupMean | RLOO | GiGPO, Field(discriminator="name")]


class PenaltySettings(Settings):
    """What an answer that was not an action costs its own turn. Rewards as they are reported stay as they are."""

    format: NonNegativeFloat = 0.0
    """Subtracted from a turn whose answer could not be read."""
    inadmissible: NonNegativeFloat = 0.0
    """Subtracted from a turn whose action was not possible."""


class BatchSettings(Settings):
    """Advantages and what a training sequence may be."""

    model_config = ConfigDict(title="Batches")

    advantage: Advantage = GroupMean(name="group_mean")
    """How the advantage of a turn is estimated, and its parameters."""
    penalty: PenaltySettings = PenaltySettings()
    """What answers that were not actions cost."""
    skip_zero_advantage: bool = True
    """Leave out groups all of whose turns have advantage 0; they carry no gradient."""
    max_sequence_tokens: PositiveInt
    """Turns that would end beyond this are dropped and counted."""
