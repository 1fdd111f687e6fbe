"""`MultimodalRLConfig`: one flat set of options for `MultimodalGRPOTrainer`, with defaults. Torch-free."""

from __future__ import annotations

from math import gcd
from pathlib import Path
from typing import Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ValidationError,
)

from armature.components.contracts.errors import ConfigurationError
from armature.components.contracts.machine import Machine
from armature.components.evaluation.settings import HeldoutSetSettings
from armature.components.inference.settings import EvaluationSamplingSettings, SamplingSettings
from armature.components.machine.registry import suggestion
from armature.components.rl.settings import LoopSettings, PreflightSettings
from armature.components.rollouts.settings import BatchSettings, GroupMean, RolloutSettings
from armature.components.vlm.settings import Aggregation, Logprobs, MaskRatio, TrainerSettings

DEFAULT_GROUP = 8
WITHOUT_USE = {
    "vllm_server_group_port": "weights reach the server as a folder that it reloads, not over a port of their own",
    "report_to": "MLflow tracking belongs to the flows: armature run train-vlm/...; history.jsonl is always written",
}


class _RolloutSettings(RolloutSettings):
    group_size: PositiveInt


class MultimodalRLConfig(BaseModel):
    """Options of `MultimodalGRPOTrainer`. Unknown ones are refused; every one has an effect.

    Each step plays `rollouts_per_step` episodes in groups of `rollouts_per_example` on the same task, and trains on
    them with the objective `mask_ratio` in updates of `batch_size` samples.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True)

    output_dir: Path = Path("outputs")
    """Checkpoints, published weights, rollouts and history.jsonl."""
    run_name: str | None = None
    """Name of the run: a folder of its own under output_dir."""
    seed: NonNegativeInt = 42
    """Seed of the tasks, of sampling and of the trainer."""

    env_id: str = ""
    """Registered environment; empty: set_environment is called."""
    env_args: dict[str, Any] = Field(default_factory=dict)
    """The environment's own settings."""
    env_tasks: PositiveInt = 1000
    """Training tasks that the environment draws."""
    max_steps: PositiveInt = 500
    """Training steps."""
    rollouts_per_step: PositiveInt = 512
    """Episodes of a step."""
    rollouts_per_example: PositiveInt | None = None
    """Episodes per task, compared with each other; 1 compares with the whole step. Default: the greatest common divisor
    of rollouts_per_step and 8."""
    primary_reward_key: str | None = None
    """Reward part to train on instead of the sum."""
    temperature: PositiveFloat = 1.0
    """Of sampling, and of the trainer's log-probs."""
    max_tokens: PositiveInt = 512
    """Longest completion of one turn."""

    batch_size: PositiveInt = 512
    """Samples per optimizer update."""
    micro_batch_size: PositiveInt = 4
    """Most samples of one forward pass."""
    max_tokens_per_micro_batch: PositiveInt = 16384
    """Most padded tokens of one forward pass."""
    packing: bool = False
    """Compute what samples of a forward pass begin with once, each distinct image once, and no padding; needs the
    adapter of the model's family."""
    mask_ratio_low: NonNegativeFloat = 0.1
    """Tokens with a smaller importance ratio are dropped."""
    mask_ratio_high: PositiveFloat = 10.0
    """Tokens with a larger importance ratio are dropped."""
    aggregation: Aggregation = "sum"
    """How tokens make one loss; the published trainer sums."""
    learning_rate: PositiveFloat = 5e-5
    """Peak learning rate of AdamW."""
    adam_beta1: float = 0.9
    """AdamW's decay of the first moment."""
    adam_beta2: float = 0.999
    """AdamW's decay of the second moment."""
    adam_epsilon: PositiveFloat = 1e-8
    """AdamW's epsilon."""
    weight_decay: NonNegativeFloat = 0.0
    """AdamW's weight decay."""
    max_grad_norm: PositiveFloat = 1.0
    """Gradients are scaled down to this norm."""
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = "constant"
    """Decay of the rate."""
    warmup_steps: NonNegativeInt = 0
    """Steps over which the rate rises linearly."""
    logprobs: Logprobs = "torch"
    """How log-probs are computed; triton needs a GPU."""
    torch_compile: bool = False
    """Compile the model's layers, which takes a minute or two."""
    bf16: bool = False
    """Matrix products in bf16; the trained weights stay fp32."""
    gradient_checkpointing: bool = False
    """Recompute activations in backward to save memory."""
    save_steps: PositiveInt = 500
    """Steps between checkpoints."""
    save_total_limit: PositiveInt = 2
    """Newest checkpoints that are kept."""

    eval_steps: NonNegativeInt = 0
    """Steps between evaluations on held-out tasks; the first is before step 1, the last after the last step, and the
    best weights become the result. 0: none."""
    eval_tasks: PositiveInt = 64
    """Held-out tasks of an evaluation: the first ones, each time."""
    eval_temperature: float = Field(0.0, ge=0, le=2)
    """Of sampling in evaluations; 0 is greedy."""
    eval_success_reward: float = 1.0
    """A held-out episode counts as solved from this reward on."""
    eval_patience: NonNegativeInt = 0
    """Training ends after so many evaluations in a row that were not better than the best; 0: never."""

    max_mismatch_kl: PositiveFloat = 1e-2
    """Refuse to train above this KL between server and trainer, measured before the first step."""
    vllm_server_host: str = "0.0.0.0"
    """Host of the vLLM server; 0.0.0.0 means this machine."""
    vllm_server_port: int = Field(8000, gt=0, lt=65536)
    """Port of the vLLM server."""
    vllm_server_timeout: PositiveFloat = 600.0
    """Seconds to wait for the server to be ready."""
    generation_timeout: PositiveFloat = 600.0
    """Seconds for one generation request."""
    max_concurrent: PositiveInt = 128
    """Concurrent episodes."""
    sync_to_vllm_every: NonNegativeInt = 1
    """Steps between weight updates of the server; 0: never."""
    log_every_steps: PositiveInt = 10
    """Steps between lines of the progress bar."""

    def __init__(self, **options: Any) -> None:
        for name in options:
            if name in WITHOUT_USE:
                raise ConfigurationError(
                    f"{name} would have no effect: {WITHOUT_USE[name]}", code="unused_option", remedy=f"remove {name}"
                )
            if name not in type(self).model_fields:
                raise ConfigurationError(
                    f"MultimodalRLConfig has no option {name!r}",
                    code="unknown_option",
                    remedy=suggestion(name, type(self).model_fields),
                )
        super().__init__(**options)
        if self.rollouts_per_step % self.group_size:
            raise ConfigurationError(
                f"rollouts_per_step ({self.rollouts_per_step}) is not a multiple of "
                f"rollouts_per_example ({self.group_size})",
                code="rollouts_not_in_groups",
                remedy="change one of them",
            )
        if self.eval_steps and self.sync_to_vllm_every != 1:
            raise ConfigurationError(
                f"eval_steps = {self.eval_steps} evaluates the newest weights, "
                f"which sync_to_vllm_every = {self.sync_to_vllm_every} keeps from the server",
                code="evaluates_old_weights",
                remedy="set sync_to_vllm_every = 1, or eval_steps = 0",
            )
        self.settings(), self.heldout_set()

    @property
    def group_size(self) -> int:
        """Episodes per task."""
        return self.rollouts_per_example or gcd(self.rollouts_per_step, DEFAULT_GROUP)

    @property
    def folder(self) -> Path:
        """Where the run writes."""
        return self.output_dir / self.run_name if self.run_name else self.output_dir

    @property
    def server_url(self) -> str:
        """Base URL of the vLLM server."""
        host = "127.0.0.1" if self.vllm_server_host in ("0.0.0.0", "::") else self.vllm_server_host
        return f"http://{host}:{self.vllm_server_port}"

    @property
    def machine(self) -> Machine:
        """The same values as the section `machine` of a recipe."""
        return Machine(
            endpoints=(self.server_url,),
            ready_timeout=self.vllm_server_timeout,
            generation_timeout=self.generation_timeout,
            max_concurrent=self.max_concurrent,
        )

    def settings(self) -> LoopSettings:
        """The same values as sections of a recipe.

        Raises:
            ConfigurationError: values that contradict each other.
        """
        try:
            n_groups = self.rollouts_per_step // self.group_size
            return LoopSettings(
                rollouts=_RolloutSettings(
                    groups_per_step=n_groups,
                    group_size=self.group_size,
                    sampling=SamplingSettings(temperature=self.temperature, max_tokens=self.max_tokens),
                    seed=self.seed,
                ),
                batches=BatchSettings(
                    advantage=GroupMean(name="group_mean", scale="none"),
                    skip_zero_advantage=False,
                    max_sequence_tokens=2**31 - 1,
                ),
                trainer=self._trainer_settings(),
                preflight=PreflightSettings(groups=min(4, n_groups), max_mismatch_kl=self.max_mismatch_kl),
            )
        except ValidationError as error:
            code = error.errors()[0]["type"]
            raise ConfigurationError(f"the options contradict each other: {error}", code=code) from error

    def heldout_set(self) -> HeldoutSetSettings | None:
        """What is evaluated between steps; None: nothing.

        Raises:
            ConfigurationError: eval_patience without eval_steps.
        """
        if self.eval_patience and not self.eval_steps:
            raise ConfigurationError(
                f"eval_patience = {self.eval_patience} counts evaluations, and there are none",
                code="patience_without_evaluations",
                remedy="set eval_steps, or leave eval_patience out",
            )
        if not self.eval_steps:
            return None
        return HeldoutSetSettings(
            every=self.eval_steps,
            heldout_tasks=self.eval_tasks,
            patience=self.eval_patience,
            success_reward=self.eval_success_reward,
            sampling=EvaluationSamplingSettings(temperature=self.eval_temperature, max_tokens=self.max_tokens),
            seed=self.seed,
        )

    def _trainer_settings(self) -> TrainerSettings:
        chunked = {} if self.logprobs == "normal" else {"chunk_tokens": 1024}
        return TrainerSettings(
            **self.model_dump(include=TrainerSettings.model_fields.keys() - {"logprobs"}),  # of the same name
            objective=MaskRatio(
                name="mask_ratio", mask_ratio_low=self.mask_ratio_low, mask_ratio_high=self.mask_ratio_high
            ),
            dr_grpo_length=self.max_tokens if self.aggregation == "dr_grpo" else None,
            lr_scheduler=self.lr_scheduler_type,
            samples_per_update=self.batch_size,
            max_rows_per_micro_batch=self.micro_batch_size,
            logprobs={"name": self.logprobs, **chunked},
            autocast="bf16" if self.bf16 else "none",
            save_every=self.save_steps,
            keep_checkpoints=self.save_total_limit,
        )
