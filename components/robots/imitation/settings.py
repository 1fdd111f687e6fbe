"""How a robot policy is trained."""

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
    """Several examples in one row, which cannot attend to one another."""

    max_row_tokens: PositiveInt
    """Tokens of a row; a longer example has a row of its own."""
    max_row_examples: PositiveInt
    """Examples of a row."""


class LearningRates(Settings):
    """Peak learning rates; with adapters, vlm, vit and connector are those of the adapters."""

    vlm: PositiveFloat = 1e-5
    """Text layers, embedding and output head."""
    vit: PositiveFloat = 5e-6
    """Vision tower."""
    connector: PositiveFloat = 5e-6
    """Image pooling and projector, and the embedding's new rows."""
    action_expert: PositiveFloat = 5e-5
    """The action expert."""


class ImageAugmentationSettings(Settings):
    """What happens to a training image: crop, rotation, colors in a random order, blur; it keeps its size."""

    crop_side: float = Field(0.95, gt=0.0, le=1.0)
    """Side of the crop, of the image's: 0.95 has 0.9025 of it."""
    rotation_degrees: NonNegativeFloat = 5.0
    """Largest rotation in degrees, either way."""
    brightness: float = Field(0.2, ge=0.0, lt=1.0)
    """The factor is drawn from 1 - this to 1 + this."""
    contrast: float = Field(0.2, ge=0.0, lt=1.0)
    """As brightness."""
    saturation: float = Field(0.2, ge=0.0, lt=1.0)
    """As brightness."""
    hue: float = Field(0.05, ge=0.0, le=0.5)
    """Largest shift, of a whole turn, either way."""
    blur_probability: float = Field(0.2, ge=0.0, le=1.0)
    """Gaussian blur of 0.1 to 2 pixels, this often."""


class HeldoutSettings(Settings):
    """Episodes that are never trained on, to measure the loss and the action error."""

    fraction: float = Field(gt=0, lt=1)
    """Share of each dataset's episodes."""
    frames: PositiveInt = 1024
    """Frames of theirs that are measured."""
    every: PositiveInt = 2000
    """Updates between measurements."""


class PolicyUpdateSettings(OptimizerSettings):
    """What of a policy is trained, and its optimizer: the same on demonstrations and on rewards."""

    mode: Mode = "full"
    """full: all weights. lora: adapters on the VLM, all of the action expert. lora_expert: adapters on both. expert:
    the action expert alone."""
    lora: AdapterSettings | None = None
    """Adapters of the modes lora and lora_expert."""
    freeze_embedding: bool = True
    """Leave the input embedding as it is, in full training."""
    max_steps: PositiveInt
    """Optimizer updates."""
    micro_batch_size: PositiveInt
    """Examples of one forward pass of a rank."""
    learning_rates: LearningRates = LearningRates()
    """Peak learning rate of each part."""
    packing: PackingSettings | None = None
    """Packs the examples of a forward pass; none: padding."""
    adam_beta2: float = Field(0.95, ge=0, lt=1)
    """AdamW's decay of the second moment."""
    adam_epsilon: PositiveFloat = 1e-6
    """AdamW's epsilon."""
    decay_steps: PositiveInt | None = None
    """Step at which the cosine ends, also when the run is shorter; none: with the run."""
    final_lr_fraction: float = Field(0.1, ge=0, le=1)
    """Learning rate after the decay, of the peak's."""

    @model_validator(mode="after")
    def _parts_fit(self) -> Self:
        adapters = self.mode in ("lora", "lora_expert")
        if adapters != (self.lora is not None):
            raise ValueError(f"mode {self.mode} {'needs' if adapters else 'has no'} section lora")
        if self.mode != "full" and not self.freeze_embedding:
            raise ValueError(f"mode {self.mode} never trains the embedding: leave out freeze_embedding = false")
        if self.mode == "expert":
            self.refuse_rates(("vlm", "vit", "connector"), "mode expert trains the action expert alone", "mode = full")
        end = self.decay_steps or self.max_steps
        if self.warmup_steps > end:
            raise ValueError(f"warmup_steps ({self.warmup_steps}) exceeds the end of the decay ({end})")
        return self

    def refuse_rates(self, parts: Sequence[str], why: str, otherwise: str) -> None:
        """Raises ValueError if one of these parts, which are not trained, has a learning rate of its own."""
        default = LearningRates()
        given = [name for name in parts if getattr(self.learning_rates, name) != getattr(default, name)]
        if given:
            names = ", ".join(f"learning_rates.{name}" for name in given)
            them, kept = ("it", "its default") if len(given) == 1 else ("them", "their defaults")
            values = ", ".join(f"{getattr(default, name):g}" for name in given)
            raise ValueError(f"{names}: {why}: leave {them} out ({kept}: {values}), or set {otherwise}")


class VLATrainerSettings(PolicyUpdateSettings):
    """The optimizer, what it may change, and what of it exists at once."""

    model_config = ConfigDict(title="Training")

    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass to save memory."""
    lora_dropout: float = Field(0.05, ge=0.0, lt=1.0)
    """Dropout before each adapter of section lora."""
    save_every: PositiveInt = 1000
    """Steps between checkpoints to resume from."""
    batch_size: PositiveInt
    """Examples of an update, of all ranks together."""
    ema_decay: float | None = Field(None, gt=0, lt=1)
    """Moving average of the trained weights, which is what is saved; none: no average."""
    augmentation: ImageAugmentationSettings | None = None
    """Changes training images; none: nothing."""
    file_shuffle: FileShuffleSettings | None = None
    """Shuffles files, and frames within a few of them, so that a rank reads its own files alone; none: shuffles all
    frames."""
    heldout: HeldoutSettings | None = None
    """Measures on episodes that are not trained on; none: trains on all."""

    @model_validator(mode="after")
    def _something_is_dropped(self) -> Self:
        if self.lora is None and self.lora_dropout != type(self).model_fields["lora_dropout"].default:
            raise ValueError("lora_dropout is of adapters, and there is no section lora: leave it out")
        return self


class TrainVLASettings(Settings):
    """The sections that a trained policy depends on."""

    policy: RobotPolicySettings
    training: VLATrainerSettings

    @model_validator(mode="after")
    def _trains_something(self) -> Self:
        if self.training.mode == "expert" and self.policy.action_mode != "continuous":
            raise ValueError(
                f"mode expert trains the action expert alone, and action_mode {self.policy.action_mode} also the VLM: "
                "set policy.action_mode to continuous"
            )
        insulated = self.policy.enable_knowledge_insulation and self.policy.action_mode == "continuous"
        if insulated and self.training.mode != "expert":
            raise ValueError(
                f"enable_knowledge_insulation leaves continuous actions no gradient to the VLM, which mode "
                f"{self.training.mode} is to train: set policy.action_mode to both, or training.mode to expert"
            )
        if self.policy.action_mode == "discrete":
            why = "policy.action_mode discrete has no loss that trains the action expert"
            self.training.refuse_rates(("action_expert",), why, "policy.action_mode = both")
        return self
