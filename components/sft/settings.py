"""How much is demonstrated, and how the model is trained on it."""

from __future__ import annotations

from pydantic import ConfigDict, Field, NonNegativeInt, PositiveInt

from armature.components.contracts.errors import ConfigurationError
from armature.components.contracts.settings import Settings
from armature.components.models.settings import ModelSettings
from armature.components.vlm.settings import Likelihood, TrainerSettings, UpdateSettings


class WarmStartSettings(UpdateSettings):
    """Supervised training on demonstrations: each goes through the real environment, only answers are trained on."""

    model_config = ConfigDict(title="Warm start")

    demonstrations: NonNegativeInt = Field(
        0, description="Tasks of the training split to demonstrate, from its first; 0: all."
    )
    heldout_demonstrations: NonNegativeInt = Field(
        0, description="Demonstrations of held-out tasks whose loss is reported, never trained on; 0: none."
    )
    success_reward: float = Field(1.0, description="A demonstration that earns less is left out and counted.")
    max_sequence_tokens: PositiveInt = Field(description="Turns that would end beyond this are dropped and counted.")
    epochs: PositiveInt = Field(1, description="How often every demonstration is trained on.")
    samples_per_step: PositiveInt = Field(32, description="Sequences of one step, which makes one update.")

    def trainer(self, max_steps: int) -> TrainerSettings:
        """A trainer that minimizes the cross-entropy of the answers' tokens, each counting alike.

        Raises:
            ConfigurationError: the warm-up of the learning rate is longer than the training.
        """
        if self.warmup_steps > max_steps:
            raise ConfigurationError(
                f"warmup_steps = {self.warmup_steps}, and the demonstrations make {max_steps} steps",
                code="warmup_too_long",
                where="warm_start.warmup_steps",
                remedy="shorten it, or raise epochs or demonstrations",
            )
        return TrainerSettings(
            **{name: getattr(self, name) for name in UpdateSettings.model_fields},
            objective=Likelihood(name="likelihood"),
            max_steps=max_steps,
        )


class SFTSettings(Settings):
    """The sections that a warm-started checkpoint depends on."""

    model: ModelSettings
    warm_start: WarmStartSettings
