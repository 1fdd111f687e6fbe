"""Settings of rollouts, of advantages and of training batches. This module does not import torch."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import ConfigDict, Field, NonNegativeFloat, NonNegativeInt, PositiveInt, model_validator

from armature.components.contracts.settings import Settings
from armature.components.inference.settings import SamplingSettings


class RolloutSettings(Settings):
    """A step collects `groups_per_step` groups of `group_size` rollouts each."""

    groups_per_step: PositiveInt = 16
    """Tasks per step, each played by one group."""
    group_size: int = Field(8, ge=2)
    """Rollouts of the same task, which are compared with each other."""
    sampling: SamplingSettings
    """Sampling of the policy's tokens."""
    max_rounds: PositiveInt = 1
    """1: train on all groups of one round. More: play rounds of groups_per_step further tasks until groups_per_step
    groups have different rewards, or this many rounds were played (dynamic sampling)."""
    repeat_no_signal: float = Field(1.0, ge=0.01, le=1)
    """Probability that an epoch repeats a task whose last group had equal rewards, which give no gradient; another task
    replaces a skipped one. 1: every epoch has every task."""
    max_staleness: int = Field(0, ge=0, le=4)
    """0: generate and train in turn; 1: generate the next step while training on this one; more: generate that many
    next steps (needs in_flight_updates)."""
    in_flight_updates: bool = False
    """Update weights while episodes are played, even within an answer, and begin episodes of the next max_staleness
    steps as soon as earlier ones end. This is faster if episodes have uneven lengths. The weights that sample a token
    then depend on timing, so a seed does not give the same run."""
    seed: NonNegativeInt = 0
    """Seed of the order of tasks and of every request."""

    @model_validator(mode="after")
    def _check_staleness(self) -> Self:
        if self.in_flight_updates and self.max_staleness < 1:
            raise ValueError("in_flight_updates needs max_staleness = 1 or more: how old a step's weights may be")
        if self.max_staleness > 1 and not self.in_flight_updates:
            raise ValueError("max_staleness above 1 needs in_flight_updates = true")
        if self.in_flight_updates and self.repeat_no_signal < 1:
            raise ValueError(
                "repeat_no_signal needs the previous step's groups to choose tasks, and with in_flight_updates they "
                "are not finished yet: set only one of the two"
            )
        return self


# --- Advantages ---

Deviation = Literal["sample", "population"]
DEVIATION = (
    "Standard deviation of n numbers: sample divides their squares by n - 1, as TRL and verl do, population by n."
)


class GroupMean(Settings):
    """The advantage is a trajectory's reward minus the mean of its group: GRPO, Dr. GRPO, DAPO, GSPO."""

    name: Literal["group_mean"]
    """Name of the advantage: group_mean."""
    scale: Literal["group_std", "batch_std", "none"] = "group_std"
    """Divisor of the centered rewards: the group's or the batch's standard deviation, or none as in Dr. GRPO."""
    deviation: Deviation = Field("sample", description=DEVIATION)

    @model_validator(mode="after")
    def _deviation_has_an_effect(self) -> GroupMean:
        if self.scale == "none" and self.deviation != "sample":
            raise ValueError("deviation has no effect with scale none: leave it out")
        return self


class RLOO(Settings):
    """The advantage is a trajectory's reward minus the mean of the other trajectories in its group."""

    name: Literal["rloo"]
    """Name of the advantage: rloo."""


class MeanNorm(Settings):
    """Subtract the mean of the scores."""

    name: Literal["mean_norm"]
    """Name of the normalization: mean_norm."""


class MeanStdNorm(Settings):
    """Subtract the mean of the scores and divide by their standard deviation."""

    name: Literal["mean_std_norm"]
    """Name of the normalization: mean_std_norm."""
    deviation: Deviation = Field("sample", description=DEVIATION)
    std_floor: NonNegativeFloat = 0.0
    """Smallest divisor, in units of reward. Without it, if all trajectories of a group have failed, the small penalty
    of one unreadable answer becomes the largest advantage."""


class ExactAnchors(Settings):
    """Two turns began at the same state if their observations are equal."""

    name: Literal["exact"]
    """Name of the comparison: exact."""


class AdmissibleAnchors(Settings):
    """Two turns began at the same state if their observations and their admissible actions are equal."""

    name: Literal["admissible"]
    """Name of the comparison: admissible."""


class SimilarAnchors(Settings):
    """Two turns began at the same state if the texts of their observations are similar."""

    name: Literal["similar"]
    """Name of the comparison: similar."""
    threshold: float = Field(0.95, gt=0, lt=1)
    """Smallest similarity ratio of two texts, as computed by difflib."""


class GiGPO(Settings):
    """Compare each trajectory with its group, and each turn with the turns that began at the same state."""

    name: Literal["gigpo"]
    """Name of the advantage: gigpo."""
    gamma: float = Field(0.95, ge=0, le=1)
    """Discount per turn of the returns that turns are compared by."""
    step_weight: NonNegativeFloat = 1.0
    """Weight of the turn's advantage, which is added to the trajectory's."""
    statistics: Literal["trajectories", "rows"] = "trajectories"
    """Unit of a group's mean and deviation. trajectories: each trajectory counts once (the paper); rows: each turn
    counts once, so long trajectories have more weight (the paper's code)."""
    norm: MeanNorm | MeanStdNorm = Field(MeanStdNorm(name="mean_std_norm"), discriminator="name")
    """Normalization of the scores."""
    anchor: ExactAnchors | AdmissibleAnchors | SimilarAnchors = Field(ExactAnchors(name="exact"), discriminator="name")
    """Rule for which turns of a group began at the same state."""


Advantage = Annotated[GroupMean | RLOO | GiGPO, Field(discriminator="name")]


class PenaltySettings(Settings):
    """Penalties for answers that are not valid actions. They change advantages; reported rewards stay the same."""

    format: NonNegativeFloat = 0.0
    """Penalty of a turn whose answer could not be parsed."""
    inadmissible: NonNegativeFloat = 0.0
    """Penalty of a turn whose action was not possible."""


class BatchSettings(Settings):
    """Advantages, penalties and the limits of training sequences."""

    model_config = ConfigDict(title="Batches")

    advantage: Advantage = GroupMean(name="group_mean")
    """Estimator of a turn's advantage, with its parameters."""
    penalty: PenaltySettings = PenaltySettings()
    """Penalties for answers that are not valid actions."""
    skip_zero_advantage: bool = True
    """Leave out groups in which every turn has advantage 0, because they have no gradient."""
    max_sequence_tokens: PositiveInt
    """Longest training sequence. Turns that would exceed it are dropped and counted."""
