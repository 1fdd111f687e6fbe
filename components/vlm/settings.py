"""What a training run is: the objective, the optimizer and the size of a micro-batch. Torch-free."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import (
    BeforeValidator,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    model_validator,
)
from pydantic_core import PydanticCustomError

from armature.components.contracts.errors import ConfigurationError
from armature.components.contracts.settings import Settings
from armature.components.models.settings import ModelSettings
from armature.components.training.schedule import OptimizerSettings, Scheduler

Aggregation = Literal["sum", "token", "sequence", "dr_grpo"]
KLEstimator = Literal["k1", "k2", "k3"]
Logprobs = Literal["normal", "torch", "triton"]


class MaskRatio(Settings):
    """Policy gradient with importance ratios; tokens whose ratio leaves the band are dropped."""

    name: Literal["mask_ratio"]
    """Which objective: mask_ratio."""
    mask_ratio_low: NonNegativeFloat = 0.125
    """Tokens with a smaller ratio are dropped."""
    mask_ratio_high: PositiveFloat = 8.0
    """Tokens with a larger ratio are dropped."""

    @model_validator(mode="after")
    def _band(self) -> MaskRatio:
        if self.mask_ratio_low >= self.mask_ratio_high:
            raise ValueError(
                f"mask_ratio_low ({self.mask_ratio_low}) must be below mask_ratio_high ({self.mask_ratio_high})"
            )
        return self


class PPO(Settings):
    """Clipped surrogate with separate lower and upper clip."""

    name: Literal["ppo"]
    """Which objective: ppo."""
    clip_low: float = Field(0.2, gt=0, lt=1)
    """The ratio is clipped below at 1 - clip_low."""
    clip_high: PositiveFloat = 0.2
    """The ratio is clipped above at 1 + clip_high."""
    dual_clip: float | None = Field(None, gt=1)
    """Where the advantage A is negative a token's loss is at most this times |A|; none: any."""


class GSPO(Settings):
    """Clipped surrogate on the length-normalized ratio of the whole sequence."""

    name: Literal["gspo"]
    """Which objective: gspo."""
    clip_low: float = Field(3e-4, gt=0, lt=1)
    """The sequence ratio is clipped below at 1 - clip_low."""
    clip_high: PositiveFloat = 4e-4
    """The sequence ratio is clipped above at 1 + clip_high."""


class CISPO(Settings):
    """REINFORCE weighted by a clipped importance weight without gradient: no token loses its gradient."""

    name: Literal["cispo"]
    """Which objective: cispo."""
    clip_high: PositiveFloat = 4.0
    """The importance weight is clipped above at 1 + clip_high."""


class Likelihood(Settings):
    """Cross-entropy of the trained tokens, whatever their advantage: supervised training."""

    name: Literal["likelihood"]
    """Which objective: likelihood."""


class FunctionObjective(Settings):
    """A loss of the user's own: a function in a file beside the recipe or in an installed package."""

    name: Literal["function"]
    """Which objective: function."""
    function: str = Field(pattern=r"^[\w.]+:\w+$")
    """MODULE:FUNCTION. It is called with the trained tokens (log-probs, advantages and more, (N,) each) and gives the
    loss of each, (N,)."""
    args: dict[str, Any] = Field({})
    """Further arguments of the function, by name."""


def _by_name(objective: Any) -> Any:
    """A text is short for the objective of that name, or for the function "module:function"."""
    if not isinstance(objective, str):
        return objective
    return {"name": "function", "function": objective} if ":" in objective else {"name": objective}


Objective = Annotated[
    MaskRatio | PPO | GSPO | CISPO | Likelihood | FunctionObjective,
    Field(discriminator="name"),
    BeforeValidator(_by_name),
]


class NoCorrection(Settings):
    """The objective's ratio is against the sampler's log-probs."""

    mode: Literal["none"]
    """Which correction: none."""


class ImportanceCorrection(Settings):
    """Corrects for a sampler that is not quite the policy at the start of the step.

    The objective's ratio is against the policy's own log-probs at the start of the step, and each token's loss is
    multiplied by w = exp(log-prob at the start - sampler's log-prob), without gradient.
    """

    mode: Literal["truncate", "mask"]
    """Which correction: weights outside floor and cap are cut to them (truncate) or set to 0 (mask)."""
    level: Literal["token", "sequence"] = "token"
    """One weight per token, or their product per sequence."""
    cap: PositiveFloat = 2.0
    """Largest importance weight."""
    floor: NonNegativeFloat = 0.0
    """Smallest importance weight; 0: any."""

    @model_validator(mode="after")
    def _bounds(self) -> ImportanceCorrection:
        if self.floor > self.cap:
            raise ValueError(f"floor ({self.floor}) must not be above cap ({self.cap})")
        return self


class WholeLogprobs(Settings):
    """The logits of all trained tokens at once."""

    name: Literal["normal"]
    """Which way: normal."""


class ChunkedLogprobs(Settings):
    """The logits a chunk at a time, which are made again for the backward pass."""

    name: Literal["torch", "triton"]
    """Which way: torch, or triton in kernels of a GPU."""
    chunk_tokens: PositiveInt = 2048
    """Trained tokens whose logits fit into memory at once. If a micro-batch has no more trained tokens than this,
    `triton` computes logits once and keeps 2 bytes of each (fp32: 4) until the backward pass."""


class UpdateSettings(OptimizerSettings):
    """The optimizer of a language model, and what of it exists at once: the same for every objective."""

    learning_rate: PositiveFloat
    """Peak learning rate of AdamW."""
    lr_scheduler: Scheduler = "constant"
    """Decay of the learning rate after the warm-up."""
    max_tokens_per_micro_batch: PositiveInt = 16384
    """Padded tokens of one forward pass, image tokens included."""
    max_rows_per_micro_batch: PositiveInt = 64
    """Sequences of one forward pass."""
    packing: bool = False
    """Compute what the sequences of a forward pass begin with once, each distinct image once, and no padding: the same
    gradients in less time. max_tokens_per_micro_batch then counts tokens that are computed."""
    logprobs: WholeLogprobs | ChunkedLogprobs = Field(ChunkedLogprobs(name="torch"), discriminator="name")
    """How log-probs of the trained tokens are computed."""
    weights: Literal["float32", "bfloat16"] = "float32"
    """Data type that trained weights compute in. bfloat16, for a model of dtype bfloat16: the optimizer updates their
    float32 masters, gradients are summed in float32, and there is no autocast."""
    autocast: Literal["none", "bf16"] = "none"
    """Data type of matrix products; weights stay as loaded."""
    activation_offloading: bool = False
    """Keep what the backward pass needs in main memory until then: less memory of the GPU, more time, the same numbers.
    With model.gradient_checkpointing it is one tensor for each layer."""
    optimizer_states: Literal["device", "cpu", "8bit"] = "device"
    """Where the states of AdamW are: on the device; in main memory (cpu), from where a GPU fetches them for an update
    of the same bits; or on the device with both moments in 8 bits, a quarter of their memory."""

    @model_validator(mode="after")
    def _one_way_to_bf16(self) -> UpdateSettings:
        if self.weights == "bfloat16" and self.autocast == "bf16":
            raise PydanticCustomError("without_effect", "weights in bfloat16 compute in it: leave autocast out")
        return self


class TrainerSettings(UpdateSettings):
    """How batches become updates. A step is one batch; it makes one update or several."""

    objective: Objective = PPO(name="ppo")
    """The loss and its parameters."""
    aggregation: Aggregation = "token"
    """Tokens to one number: sum (mask_ratio as first published), token (mean over all tokens), sequence (mean of the
    sequences' means) or dr_grpo (sum / (sequences * dr_grpo_length))."""
    dr_grpo_length: PositiveInt | None = None
    """The constant length of aggregation dr_grpo, usually the longest completion."""
    correction: NoCorrection | ImportanceCorrection = Field(NoCorrection(mode="none"), discriminator="mode")
    """Importance correction for the sampler's log-probs."""
    kl_coefficient: NonNegativeFloat = 0.0
    """Weight of the KL to the initial model; 0: none."""
    kl_estimator: KLEstimator = "k3"
    """What estimates this KL, with d = log-prob of the initial model - log-prob: k1 is -d, k2 is d^2 / 2, k3 is exp(d)
    - 1 - d."""
    entropy_coefficient: NonNegativeFloat = 0.0
    """Weight of the entropy bonus; 0: none."""
    max_steps: PositiveInt
    """Steps of the run; the decay ends there."""
    samples_per_update: NonNegativeInt = 0
    """Sequences per optimizer update; 0: the whole batch."""

    @model_validator(mode="after")
    def _consistent(self) -> TrainerSettings:
        if self.aggregation == "dr_grpo" and self.dr_grpo_length is None:
            raise PydanticCustomError(
                "dr_grpo_length_missing",
                "aggregation dr_grpo divides by dr_grpo_length: set it, usually to the longest completion",
            )
        if self.aggregation != "dr_grpo" and self.dr_grpo_length is not None:
            raise PydanticCustomError(
                "without_effect", f"dr_grpo_length has no effect with aggregation {self.aggregation}: leave it out"
            )
        if self.objective.name == "mask_ratio" and self.correction.mode != "none":
            raise PydanticCustomError(
                "corrected_twice",
                "objective mask_ratio already weighs tokens by the sampler's ratio: set correction.mode to none",
            )
        if self.kl_coefficient == 0 and self.kl_estimator != "k3":
            raise PydanticCustomError(
                "without_effect", f"kl_estimator {self.kl_estimator} has no effect with kl_coefficient 0: leave it out"
            )
        if self.warmup_steps > self.max_steps:
            raise ValueError(f"warmup_steps ({self.warmup_steps}) exceeds max_steps ({self.max_steps})")
        return self


# How much is demonstrated, and how the model is trained on it.


class WarmStartSettings(UpdateSettings):
    """Supervised training on demonstrations: each goes through the real environment, only answers are trained on."""

    model_config = ConfigDict(title="Warm start")

    demonstrations: NonNegativeInt = 0
    """Tasks of the training split to demonstrate, from its first; 0: all."""
    heldout_demonstrations: NonNegativeInt = 0
    """Demonstrations of held-out tasks whose loss is reported, never trained on; 0: none."""
    success_reward: float = 1.0
    """A demonstration that earns less is left out and counted."""
    max_sequence_tokens: PositiveInt
    """Turns that would end beyond this are dropped and counted."""
    epochs: PositiveInt = 1
    """How often every demonstration is trained on."""
    samples_per_step: PositiveInt = 32
    """Sequences of one step, which makes one update."""

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
