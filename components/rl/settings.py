"""What decides the outcome of an RL run."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import ConfigDict, PositiveFloat, PositiveInt, field_validator, model_validator

from armature.components.contracts.settings import Settings
from armature.components.environments.settings import EnvironmentSettings
from armature.components.evaluation.settings import HeldoutSetSettings, TrainEvaluationSettings
from armature.components.inference.settings import ServerSettings
from armature.components.models.settings import ModelSettings
from armature.components.rollouts.settings import BatchSettings, RolloutSettings
from armature.components.vlm.settings import TrainerSettings


class PreflightSettings(Settings):
    """What trainer and server must agree on before the first step, and in every step."""

    model_config = ConfigDict(title="Pre-flight")

    groups: PositiveInt = 4
    """Groups of rollouts that are scored by both sides."""
    max_mismatch_kl: PositiveFloat = 1e-3
    """Refuse to train above this k3 KL(server || trainer)."""
    max_step_mismatch_kl: PositiveFloat = 0.1
    """Largest k3 KL(server || trainer) of a step's first update, where its rollouts are of the weights before it (not
    of earlier ones, as max_staleness allows: then the policy has moved since)."""
    step_mismatch: Literal["stop", "warn"] = "stop"
    """Whether a step above max_step_mismatch_kl ends the run before it is saved, or is only said."""


class LoopSettings(Settings):
    """What the loop reads, whatever is played and trained."""

    rollouts: RolloutSettings
    batches: BatchSettings
    trainer: TrainerSettings
    preflight: PreflightSettings


class TrainVLMSettings(Settings):
    """The sections of a train-vlm recipe that the trained weights depend on."""

    model: ModelSettings
    environment: EnvironmentSettings
    inference: ServerSettings
    rollouts: RolloutSettings
    batches: BatchSettings
    trainer: TrainerSettings
    preflight: PreflightSettings
    evaluation: HeldoutSetSettings | None = None

    @field_validator("evaluation", mode="before")
    @classmethod
    def _what_is_played_during_training(cls, value: Any) -> Any:
        """Of the section: how the trained model is evaluated does not change it."""
        return value.heldout_set if isinstance(value, TrainEvaluationSettings) else value

    @model_validator(mode="after")
    def _what_is_not_repeatable_is_not_promised(self) -> Self:
        if self.rollouts.in_flight_updates and self.inference.deterministic:
            raise ValueError(
                "rollouts.in_flight_updates: the same seed does not give the same run, as inference.deterministic "
                "promises: leave one of the two out"
            )
        return self

    @model_validator(mode="after")
    def _servers_that_round_are_corrected_for(self) -> Self:
        corrected = self.trainer.correction.mode != "none" or self.trainer.objective.name == "mask_ratio"
        if self.inference.quantization is not None and not corrected:
            raise ValueError(
                "inference.quantization: servers that compute in 8 bits sample from another distribution than the "
                'trainer\'s, which biases every update: set trainer.correction.mode = "truncate"'
            )
        return self

    @property
    def loop(self) -> LoopSettings:
        return LoopSettings(
            rollouts=self.rollouts, batches=self.batches, trainer=self.trainer, preflight=self.preflight
        )
