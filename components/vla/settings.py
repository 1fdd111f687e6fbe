"""How a robot policy is trained."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import ConfigDict, Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from components.contracts.settings import Settings
from components.policies.settings import PolicySettings

Mode = Literal["full", "lora", "lora_expert", "expert"]


class LoraSettings(Settings):
    """Low-rank adapters: a layer's output gets alpha / rank * B A dropout(x), with B = 0 at first."""

    rank: PositiveInt
    alpha: PositiveFloat
    dropout: float = Field(ge=0.0, lt=1.0)


class PackingSettings(Settings):
    """Several examples in one row, which cannot see one another."""

    max_row_tokens: PositiveInt = Field(description="Tokens of a row; a longer example has a row of its own.")
    max_row_examples: PositiveInt = Field(description="Examples of a row.")


class LearningRates(Settings):
    """Peak learning rates; with adapters, vlm, vit and connector are those of the adapters."""

    vlm: PositiveFloat = Field(description="Text layers, embedding and output head.")
    vit: PositiveFloat = Field(description="Vision tower.")
    connector: PositiveFloat = Field(description="Image pooling and projector, and the embedding's new rows.")
    action_expert: PositiveFloat


class AugmentationSettings(Settings):
    """What happens to a training picture: crop, rotation, colours in a random order, blur; it keeps its size."""

    crop_side: float = Field(gt=0.0, le=1.0, description="Side of the crop, of the picture's: 0.95 has 0.9025 of it.")
    rotation_degrees: NonNegativeFloat = Field(description="Largest rotation, either way.")
    brightness: float = Field(ge=0.0, lt=1.0, description="The factor is drawn from 1 - this to 1 + this.")
    contrast: float = Field(ge=0.0, lt=1.0, description="As brightness.")
    saturation: float = Field(ge=0.0, lt=1.0, description="As brightness.")
    hue: float = Field(ge=0.0, le=0.5, description="Largest shift, of a whole turn, either way.")
    blur_probability: float = Field(ge=0.0, le=1.0, description="Gaussian blur of 0.1 to 2 pixels, this often.")


class VlaTrainerSettings(Settings):
    """The optimiser, what it may change, and what of it exists at once."""

    model_config = ConfigDict(title="Training")

    mode: Mode = Field(
        description="full: all weights. lora: adapters on the VLM, all of the action expert. lora_expert: adapters on "
        "both. expert: the action expert alone."
    )
    lora: LoraSettings | None = Field(None, description="Adapters of the modes lora and lora_expert.")
    freeze_embedding: bool = Field(description="Leave the input embedding as it is, in full training.")
    gradient_checkpointing: bool = Field(description="Compute activations again instead of keeping them.")
    max_steps: PositiveInt = Field(description="Optimiser updates.")
    batch_size: PositiveInt = Field(description="Examples of an update, of all ranks together.")
    micro_batch_size: PositiveInt = Field(description="Examples of one forward pass of a rank.")
    packing: PackingSettings | None = Field(None, description="Packs the examples of a forward pass; none: padding.")
    learning_rates: LearningRates
    adam_beta1: float = Field(ge=0, lt=1, description="AdamW's decay of the first moment.")
    adam_beta2: float = Field(ge=0, lt=1, description="AdamW's decay of the second moment.")
    adam_epsilon: PositiveFloat = Field(description="AdamW's epsilon.")
    weight_decay: NonNegativeFloat = Field(description="AdamW's decoupled weight decay.")
    max_grad_norm: PositiveFloat = Field(description="The gradients of each parameter group are scaled to this norm.")
    warmup_steps: NonNegativeInt = Field(description="Updates over which learning rates rise linearly.")
    decay_steps: PositiveInt | None = Field(
        None, description="Update at which the cosine ends, also when the run is shorter; none: with the run."
    )
    final_lr_fraction: float = Field(ge=0, le=1, description="Learning rate after the decay, of the peak's.")
    ema_decay: float | None = Field(
        None, gt=0, lt=1, description="Moving average of the trained weights, which is what is saved; none: no average."
    )
    augmentation: AugmentationSettings | None = Field(None, description="Changes training pictures; none: nothing.")
    heldout_fraction: float = Field(ge=0, lt=1, description="Episodes that are never trained on; 0: none.")
    heldout_frames: PositiveInt = Field(description="Frames of theirs over which loss and action error are measured.")
    evaluate_every: PositiveInt = Field(description="Updates between measurements on held-out frames.")
    save_every: PositiveInt = Field(description="Updates between checkpoints to resume from.")
    keep_checkpoints: PositiveInt = Field(description="Newest checkpoints that are kept.")
    seed: NonNegativeInt = Field(description="Seed of data order, augmentation, flow times, noise and dropout.")

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        adapters = self.mode in ("lora", "lora_expert")
        if adapters != (self.lora is not None):
            raise ValueError(f"mode {self.mode} {'needs' if adapters else 'has no'} section lora")
        end = self.decay_steps or self.max_steps
        if self.warmup_steps > end:
            raise ValueError(f"warmup_steps ({self.warmup_steps}) exceeds the end of the decay ({end})")
        return self


class TrainVlaSettings(Settings):
    """The sections that a trained policy depends on."""

    policy: PolicySettings
    training: VlaTrainerSettings

    @model_validator(mode="after")
    def _trains_something(self) -> Self:
        if self.training.mode == "expert" and self.policy.action_mode != "continuous":
            raise ValueError(
                f"mode expert trains the action expert alone, and action_mode {self.policy.action_mode} also the VLM: "
                "set policy.action_mode to continuous"
            )
        return self
