"""Settings of training a robot policy on demonstrations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Self

from pydantic import ConfigDict, Field, NonNegativeFloat, PositiveFloat, PositiveInt, model_validator

from armature.components.contracts.settings import Settings
from armature.components.models.settings import AdapterSettings
from armature.components.robots.datasets.settings import FileShuffleSettings
from armature.components.robots.policies.settings import RobotPolicySettings
from armature.components.training.schedule import OptimizerSettings

Mode = Literal["full", "lora", "lora_expert", "expert"]


class PackingSettings(Settings):
    """Packing of several examples into one row, where they cannot attend to one another."""

    max_row_tokens: PositiveInt
    """Largest number of tokens in a row; a longer example gets a row of its own."""
    max_row_examples: PositiveInt
    """Largest number of examples in a row."""


class LearningRates(Settings):
    """Peak learning rates. If adapters are trained, `vlm`, `vit` and `connector` are the rates of their adapters."""

    vlm: PositiveFloat = 1e-5
    """Text layers, embedding and output head."""
    vit: PositiveFloat = 5e-6
    """Vision tower."""
    connector: PositiveFloat = 5e-6
    """Image pooling and projector, and the embedding's new rows."""
    action_expert: PositiveFloat = 5e-5
    """The action expert."""


class ImageAugmentationSettings(Settings):
    """Random changes of training images: crop, rotation, colors in a random order, blur; images keep their size."""

    crop_side: float = Field(0.95, gt=0.0, le=1.0)
    """Side of the crop as a fraction of the image's side; 0.95 keeps 0.9025 of the area."""
    rotation_degrees: NonNegativeFloat = 5.0
    """Largest rotation in degrees, in both directions."""
    brightness: float = Field(0.2, ge=0.0, lt=1.0)
    """Largest change of brightness: its factor is drawn from [1 - brightness, 1 + brightness]."""
    contrast: float = Field(0.2, ge=0.0, lt=1.0)
    """Largest change of contrast: its factor is drawn from [1 - contrast, 1 + contrast]."""
    saturation: float = Field(0.2, ge=0.0, lt=1.0)
    """Largest change of saturation: its factor is drawn from [1 - saturation, 1 + saturation]."""
    hue: float = Field(0.05, ge=0.0, le=0.5)
    """Largest shift of the hue, as a fraction of a full circle, in both directions."""
    blur_probability: float = Field(0.2, ge=0.0, le=1.0)
    """Probability of a Gaussian blur of 0.1 to 2 pixels."""


class HeldoutSettings(Settings):
    """Episodes that are held out from training to measure the loss and the action error."""

    fraction: float = Field(gt=0, lt=1)
    """Fraction of each dataset's episodes to hold out."""
    frames: PositiveInt = 1024
    """Number of held-out frames to measure on."""
    every: PositiveInt = 2000
    """Number of updates between measurements."""


class PolicyUpdateSettings(OptimizerSettings):
    """Trained parts of a policy and their optimizer, for demonstrations as well as for rewards."""

    mode: Mode = "full"
    """Weights to train. full: all. lora: adapters on the VLM and all of the action expert. lora_expert: adapters on
    both. expert: only the action expert."""
    lora: AdapterSettings | None = None
    """Adapters of the modes lora and lora_expert."""
    freeze_embedding: bool = True
    """Freeze the input embedding in mode full."""
    max_steps: PositiveInt
    """Number of optimizer updates."""
    micro_batch_size: PositiveInt
    """Number of examples in one forward pass of a rank."""
    learning_rates: LearningRates = LearningRates()
    """Peak learning rate of each part."""
    packing: PackingSettings | None = None
    """Packing of the examples of a forward pass; none: one example per row, padded."""
    adam_beta2: float = Field(0.95, ge=0, lt=1)
    """AdamW's decay of the second moment."""
    adam_epsilon: PositiveFloat = 1e-6
    """AdamW's epsilon."""
    decay_steps: PositiveInt | None = None
    """Step at which the cosine decay ends, also if the run is shorter; none: the last step."""
    final_lr_fraction: float = Field(0.1, ge=0, le=1)
    """Learning rate after the decay, as a fraction of the peak."""

    @model_validator(mode="after")
    def _parts_fit(self) -> Self:
        adapters = self.mode in ("lora", "lora_expert")
        if adapters != (self.lora is not None):
            raise ValueError(f"mode {self.mode} {'needs the' if adapters else 'cannot have a'} section lora")
        if self.mode != "full" and not self.freeze_embedding:
            raise ValueError(f"mode {self.mode} never trains the embedding: remove freeze_embedding = false")
        if self.mode == "expert":
            self.refuse_rates(("vlm", "vit", "connector"), "mode expert only trains the action expert", "mode = full")
        end = self.decay_steps or self.max_steps
        if self.warmup_steps > end:
            raise ValueError(f"warmup_steps ({self.warmup_steps}) exceeds the end of the decay ({end})")
        return self

    def refuse_rates(self, parts: Sequence[str], why: str, otherwise: str) -> None:
        """Raise ValueError if a part in `parts`, which is not trained, has a learning rate other than its default."""
        default = LearningRates()
        changed = [name for name in parts if getattr(self.learning_rates, name) != getattr(default, name)]
        if changed:
            names = ", ".join(f"learning_rates.{name}" for name in changed)
            values = ", ".join(f"{getattr(default, name):g}" for name in changed)
            raise ValueError(f"{names}: {why}: remove the learning rates (default: {values}), or set {otherwise}")


class VLATrainerSettings(PolicyUpdateSettings):
    """Settings of training on demonstrations.

    Example:
        >>> settings = VLATrainerSettings(max_steps=1000, batch_size=64, micro_batch_size=8, mode="expert")
        >>> settings.learning_rates.action_expert
        5e-05
    """

    model_config = ConfigDict(title="Training")

    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass to save memory."""
    lora_dropout: float = Field(0.05, ge=0.0, lt=1.0)
    """Dropout before each adapter of section lora."""
    save_every: PositiveInt = 1000
    """Number of steps between checkpoints to resume from."""
    batch_size: PositiveInt
    """Number of examples of an update, over all ranks."""
    ema_decay: float | None = Field(None, gt=0, lt=1)
    """Decay of a moving average of the trained weights, which is saved in their place; none: no average."""
    augmentation: ImageAugmentationSettings | None = None
    """Random changes of training images; none: no changes."""
    file_shuffle: FileShuffleSettings | None = None
    """Shuffling of files, and of frames within a few files, so that each rank only reads its own files; none: shuffle
    all frames."""
    heldout: HeldoutSettings | None = None
    """Episodes held out for measurements; none: train on all episodes."""

    @model_validator(mode="after")
    def _dropout_has_adapters(self) -> Self:
        if self.lora is None and self.lora_dropout != type(self).model_fields["lora_dropout"].default:
            raise ValueError("lora_dropout needs adapters, but there is no section lora: remove lora_dropout")
        return self


class TrainVLASettings(Settings):
    """Sections of a recipe that determine the trained policy."""

    policy: RobotPolicySettings
    """Policy to train."""
    training: VLATrainerSettings
    """Training settings."""

    @model_validator(mode="after")
    def _modes_fit(self) -> Self:
        if self.training.mode == "expert" and self.policy.action_mode != "continuous":
            raise ValueError(
                f"mode expert only trains the action expert, but action_mode {self.policy.action_mode} trains the VLM: "
                "set policy.action_mode to continuous"
            )
        self.policy.refuse_unsupported(training=self.training)
        insulated = self.policy.enable_knowledge_insulation and self.policy.action_mode == "continuous"
        if insulated and self.training.mode != "expert":
            raise ValueError(
                f"with enable_knowledge_insulation, continuous actions have no gradient into the VLM, but mode "
                f"{self.training.mode} trains it: set policy.action_mode to both, or training.mode to expert"
            )
        if self.policy.action_mode == "discrete":
            why = "policy.action_mode discrete does not train the action expert"
            self.training.refuse_rates(("action_expert",), why, "policy.action_mode = both")
        return self
