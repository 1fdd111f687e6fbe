"""Settings of a training run: objective, optimizer, micro-batches, and the warm start. Torch-free."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

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
    """Policy gradient weighted by importance ratios. Tokens whose ratio is outside of a band are dropped."""

    name: Literal["mask_ratio"]
    """Name of the objective: mask_ratio."""
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
    """PPO's clipped surrogate with separate lower and upper clip."""

    name: Literal["ppo"]
    """Name of the objective: ppo."""
    clip_low: float = Field(0.2, gt=0, lt=1)
    """The ratio is clipped below at 1 - clip_low."""
    clip_high: PositiveFloat = 0.2
    """The ratio is clipped above at 1 + clip_high."""
    dual_clip: float | None = Field(None, gt=1)
    """If the advantage A is negative, a token's loss is at most this times |A|; unset: no such bound."""


class GSPO(Settings):
    """GSPO: PPO's clipped surrogate on the length-normalized ratio of the whole sequence."""

    name: Literal["gspo"]
    """Name of the objective: gspo."""
    clip_low: float = Field(3e-4, gt=0, lt=1)
    """The sequence ratio is clipped below at 1 - clip_low."""
    clip_high: PositiveFloat = 4e-4
    """The sequence ratio is clipped above at 1 + clip_high."""


class CISPO(Settings):
    """CISPO: REINFORCE weighted by a clipped importance weight without gradient, so every token keeps its gradient."""

    name: Literal["cispo"]
    """Name of the objective: cispo."""
    clip_high: PositiveFloat = 4.0
    """The importance weight is clipped above at 1 + clip_high."""


class Likelihood(Settings):
    """Cross-entropy of the trained tokens, whatever their advantage: supervised training."""

    name: Literal["likelihood"]
    """Name of the objective: likelihood."""


class FunctionObjective(Settings):
    """A loss function of the user, in a file beside the recipe or in an installed package."""

    name: Literal["function"]
    """Name of the objective: function."""
    function: str = Field(pattern=r"^[\w.]+:\w+$")
    """MODULE:FUNCTION. The function gets the N trained tokens (log-probs, advantages and more, (N,) each) and returns
    the loss of each token, (N,)."""
    args: dict[str, Any] = Field({})
    """Further keyword arguments of the function."""


def _by_name(objective: Any) -> Any:
    """Convert a text to objective settings: the objective of that name, or "module:function" to a function
    objective."""
    if not isinstance(objective, str):
        return objective
    return {"name": "function", "function": objective} if ":" in objective else {"name": objective}


Objective = Annotated[
    MaskRatio | PPO | GSPO | CISPO | Likelihood | FunctionObjective,
    Field(discriminator="name"),
    BeforeValidator(_by_name),
]


class NoCorrection(Settings):
    """No importance correction: the objective's ratio is against the sampler's log-probs."""

    mode: Literal["none"]
    """Kind of correction: none."""


class ImportanceCorrection(Settings):
    """Corrects for a sampler whose probabilities differ from the policy's at the start of the step.

    The objective's ratio is against the trainer's log-probs at the start of the step, and each token's loss is
    multiplied by the weight w = exp(log-prob at the start - sampler's log-prob), without gradient.
    """

    mode: Literal["truncate", "mask"]
    """Kind of correction: weights below floor or above cap are set to these bounds (truncate) or to 0 (mask)."""
    level: Literal["token", "sequence"] = "token"
    """Weight each token by its own ratio (token), or by the product of the ratios of its sequence (sequence)."""
    cap: PositiveFloat = 2.0
    """Largest importance weight."""
    floor: NonNegativeFloat = 0.0
    """Smallest importance weight; 0: no lower bound."""

    @model_validator(mode="after")
    def _bounds(self) -> ImportanceCorrection:
        if self.floor > self.cap:
            raise ValueError(f"floor ({self.floor}) must not be above cap ({self.cap})")
        return self


class WholeLogprobs(Settings):
    """Compute the logits of all trained tokens of a micro-batch at once."""

    name: Literal["normal"]
    """Name of the backend: normal."""


class ChunkedLogprobs(Settings):
    """Compute the logits in chunks, and again in the backward pass."""

    name: Literal["torch", "triton"]
    """Name of the backend: torch, or triton with kernels for GPUs."""
    chunk_tokens: PositiveInt = 2048
    """Number of trained tokens whose logits are in memory at once. If a micro-batch has no more trained tokens than
    this, `triton` computes logits once and keeps 2 bytes of each (in fp32 4) until the backward pass."""


class SampledReverseKL(Settings):
    """Reverse KL estimated at the sampled tokens: each token's advantage is the teacher's log-prob minus the
    sampler's."""

    name: Literal["sampled"]
    """Name of the loss: sampled."""


class ForwardKL(Settings):
    """KL(teacher || student) at each sampled token, over the teacher's likeliest tokens and the rest as one."""

    name: Literal["forward_kl"]
    """Name of the loss: forward_kl."""
    likeliest: PositiveInt = 16
    """Number of the teacher's likeliest tokens that are told apart."""


class ReverseKL(Settings):
    """KL(student || teacher) at each sampled token, over the teacher's likeliest tokens and the rest as one."""

    name: Literal["reverse_kl"]
    """Name of the loss: reverse_kl."""
    likeliest: PositiveInt = 16
    """Number of the teacher's likeliest tokens that are told apart."""


class JSD(Settings):
    """Generalized Jensen-Shannon divergence of teacher and student at each sampled token, over the teacher's likeliest
    tokens and the rest as one."""

    name: Literal["jsd"]
    """Name of the loss: jsd."""
    likeliest: PositiveInt = 16
    """Number of the teacher's likeliest tokens that are told apart."""
    beta: float = Field(0.5, gt=0, lt=1)
    """Weight of the teacher in the mixture of both that each is compared with."""


Divergence = ForwardKL | ReverseKL | JSD


class TeacherModel(Settings):
    """A model that scores the samples of the trained model."""

    source: str = ""
    """Folder of the teacher, or its hub name; an artifact of a training is a folder too. It must have the tokenizer and
    the image processor of the trained model, which is checked before the first step."""
    revision: str | None = None
    """Commit, tag or branch; required for a hub name."""
    recipe: str = ""
    """Recipe of train-vlm that trains the teacher, in place of `source`. It is run first, unless it was run before."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Data type of the teacher's weights."""

    @model_validator(mode="after")
    def _comes_from_one_place(self) -> Self:
        if bool(self.source) == bool(self.recipe):
            raise ValueError("a teacher has either a source or a recipe that trains it: set one of the two")
        return self

    @property
    def model(self) -> ModelSettings:
        """The settings with which the teacher is loaded."""
        return ModelSettings(source=self.source or self.recipe, revision=self.revision, dtype=self.dtype)


class TeacherSettings(TeacherModel):
    """Models whose distributions the trained model learns on its own samples (on-policy distillation): one for all
    tasks, or one for each kind of task."""

    kinds: dict[str, TeacherModel] = Field({})
    """Teachers by the kind of task that they score, such as the name of a mixture's environment. `source` or `recipe`
    is the teacher of all other tasks; without it each kind needs a teacher here."""
    kind_field: str = ""
    """Field of the tasks' payload that has their kind. Unset: evaluation.kind_field, "environment" for a mixture."""
    loss: SampledReverseKL | Divergence = Field(SampledReverseKL(name="sampled"), discriminator="name")
    """Distance between teacher and trained model."""
    weight: float = Field(1.0, gt=0, le=1)
    """Share of the teacher in the loss; the share of the rewards is 1 - weight."""

    @model_validator(mode="after")
    def _comes_from_one_place(self) -> Self:
        if (self.source and self.recipe) or not self.models:
            raise ValueError("a teacher has either a source or a recipe that trains it: set one of the two, or kinds")
        return self

    @property
    def models(self) -> dict[str, TeacherModel]:
        """The teachers by the kind of task that they score; "" stands for all other kinds."""
        return ({"": self} if self.source or self.recipe else {}) | self.kinds

    @property
    def likeliest(self) -> int:
        """Number of the teacher's likeliest tokens that the loss needs at each sampled token."""
        return 0 if isinstance(self.loss, SampledReverseKL) else self.loss.likeliest


class UpdateSettings(OptimizerSettings):
    """Optimizer, micro-batches and memory options of a language model, the same for every objective."""

    learning_rate: PositiveFloat
    """Peak learning rate of AdamW."""
    lr_scheduler: Scheduler = "constant"
    """Decay of the learning rate after the warm-up."""
    max_tokens_per_micro_batch: PositiveInt = 16384
    """Largest number of padded tokens of one forward pass, image tokens included."""
    max_rows_per_micro_batch: PositiveInt = 64
    """Largest number of sequences of one forward pass."""
    packing: bool = False
    """Pack the sequences of a forward pass: compute shared prefixes and each distinct image once, and no padding.
    This gives the same gradients in less time. max_tokens_per_micro_batch then counts the tokens that are computed."""
    logprobs: WholeLogprobs | ChunkedLogprobs = Field(ChunkedLogprobs(name="torch"), discriminator="name")
    """The backend that computes log-probs of the trained tokens."""
    weights: Literal["float32", "bfloat16"] = "float32"
    """Data type of the trained weights. bfloat16 needs a model of dtype bfloat16 and no autocast: the optimizer then
    updates float32 masters of the weights, and gradients are summed in float32."""
    autocast: Literal["none", "bf16"] = "none"
    """Data type of matrix products; weights keep their own."""
    activation_offloading: bool = False
    """Keep activations in main memory until the backward pass: less GPU memory, more time, the same results. With
    model.gradient_checkpointing this is one tensor per layer."""
    optimizer_states: Literal["device", "cpu", "8bit"] = "device"
    """Storage of AdamW's states between updates: on the device; in main memory (cpu), from where a GPU copies them for
    each update, with the same results; or on the device with moments in 8 bits (8bit), a quarter of their memory."""

    @model_validator(mode="after")
    def _one_way_to_bf16(self) -> UpdateSettings:
        if self.weights == "bfloat16" and self.autocast == "bf16":
            raise PydanticCustomError(
                "without_effect", "autocast has no effect, because weights are bfloat16: omit autocast"
            )
        return self


class TrainerSettings(UpdateSettings):
    """The objective and the optimizer. A training step uses one batch, for one optimizer update or several."""

    objective: Objective = PPO(name="ppo")
    """The loss and its parameters."""
    aggregation: Aggregation = "token"
    """Reduction of the tokens' losses to one number: sum (as mask_ratio was published), token (mean over all tokens),
    sequence (mean of the sequences' means) or dr_grpo (sum / (sequences * dr_grpo_length))."""
    dr_grpo_length: PositiveInt | None = None
    """The constant length by which aggregation dr_grpo divides, usually the longest allowed completion."""
    correction: NoCorrection | ImportanceCorrection = Field(NoCorrection(mode="none"), discriminator="mode")
    """Importance correction for the sampler's log-probs."""
    kl_coefficient: NonNegativeFloat = 0.0
    """Weight of the KL to the initial model in the loss; 0: no KL term."""
    kl_estimator: KLEstimator = "k3"
    """Estimator of this KL. With d = log-prob of the initial model - log-prob, k1 is -d, k2 is d^2 / 2 and k3 is
    exp(d) - 1 - d."""
    entropy_coefficient: NonNegativeFloat = 0.0
    """Weight of the entropy bonus in the loss; 0: no bonus."""
    load_balance_coefficient: NonNegativeFloat = 0.0
    """Weight of a loss that spreads tokens evenly over the experts of a mixture; 0: no such loss. It is computed for
    each micro-batch, and needs model.train_routers."""
    max_steps: PositiveInt
    """Number of steps of the run, at which the decay of the learning rate ends."""
    samples_per_update: NonNegativeInt = 0
    """Number of sequences per optimizer update; 0: the whole batch."""

    @model_validator(mode="after")
    def _consistent(self) -> TrainerSettings:
        if self.aggregation == "dr_grpo" and self.dr_grpo_length is None:
            raise PydanticCustomError(
                "dr_grpo_length_missing",
                "aggregation dr_grpo needs dr_grpo_length: set it, usually to the longest allowed completion",
            )
        if self.aggregation != "dr_grpo" and self.dr_grpo_length is not None:
            raise PydanticCustomError(
                "without_effect", f"dr_grpo_length has no effect with aggregation {self.aggregation}: omit it"
            )
        if self.objective.name == "mask_ratio" and self.correction.mode != "none":
            raise PydanticCustomError(
                "corrected_twice",
                "objective mask_ratio already weights tokens by the sampler's ratio: set correction.mode to none",
            )
        if self.kl_coefficient == 0 and self.kl_estimator != "k3":
            raise PydanticCustomError(
                "without_effect", f"kl_estimator {self.kl_estimator} has no effect with kl_coefficient 0: omit it"
            )
        if self.warmup_steps > self.max_steps:
            raise ValueError(f"warmup_steps ({self.warmup_steps}) exceeds max_steps ({self.max_steps})")
        return self


class SupervisedSettings(UpdateSettings):
    """Supervised training on the assistant's tokens of conversations."""

    model_config = ConfigDict(title="Supervised training")

    max_sequence_tokens: PositiveInt
    """Turns that would end beyond this number of tokens are dropped and counted."""
    epochs: PositiveInt = 1
    """Number of times that each conversation is trained on."""
    samples_per_step: PositiveInt = 32
    """Number of sequences of a step, which makes one optimizer update."""

    def trainer(self, max_steps: int) -> TrainerSettings:
        """Return settings of a trainer that minimizes the cross-entropy of the answers' tokens, all weighted equally.

        Raises:
            ConfigurationError: the warm-up of the learning rate is longer than the training.
        """
        if self.warmup_steps > max_steps:
            raise ConfigurationError(
                f"warmup_steps = {self.warmup_steps}, but the conversations make only {max_steps} steps",
                code="warmup_too_long",
                where="trainer.warmup_steps or warm_start.warmup_steps",
                remedy="lower warmup_steps, raise epochs, or give more conversations",
            )
        return TrainerSettings(
            **{name: getattr(self, name) for name in UpdateSettings.model_fields},
            objective=Likelihood(name="likelihood"),
            max_steps=max_steps,
        )


class WarmStartSettings(SupervisedSettings):
    """Supervised training on demonstrations that are played in the environment. Only answers are trained on."""

    model_config = ConfigDict(title="Warm start")

    demonstrations: NonNegativeInt = 0
    """Number of tasks of the training split that are demonstrated, from the first one on; 0: all."""
    heldout_demonstrations: NonNegativeInt = 0
    """Number of held-out tasks that are demonstrated to report their loss; they are never trained on. 0: none."""
    success_reward: float = 1.0
    """Demonstrations with a smaller reward are dropped and counted."""


class WarmStartStageSettings(Settings):
    """The sections of a recipe on which a warm-started checkpoint depends."""

    model: ModelSettings
    warm_start: WarmStartSettings
