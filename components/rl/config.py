"""`MultimodalRLConfig`: the options of `MultimodalGRPOTrainer` as one flat class with defaults. Torch-free."""

from __future__ import annotations

from collections.abc import Iterable
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
)

from armature.components.configuration.problems import explained
from armature.components.contracts.errors import ConfigurationError
from armature.components.contracts.machine import Machine, MachineLimits, MachineServers
from armature.components.evaluation.settings import HeldoutSetSettings
from armature.components.inference.settings import EvaluationSamplingSettings, SamplingSettings
from armature.components.machine.registry import suggestion
from armature.components.machine.resources import gpu_count
from armature.components.models.settings import LoraSettings, Recomputation
from armature.components.rl.settings import LoopSettings, PreflightSettings
from armature.components.rollouts.settings import BatchSettings, GroupMean, RolloutSettings
from armature.components.vlm.settings import Aggregation, Logprobs, MaskRatio, TrainerSettings

DEFAULT_GROUP = 8
"""Default number of episodes per task.

If rollouts_per_step is not a multiple of it, the greatest common divisor of the two is used.
"""
WITHOUT_USE = {
    "vllm_server_group_port": "the server reloads weights from a folder, so there is no port for them",
    "report_to": "it is an argument of MultimodalGRPOTrainer, beside config",
    "beta": "the objective mask_ratio has no KL penalty",
}
"""Options of similar trainers that would have no effect here, each with the reason."""
NAMES_FROM_TRL = {
    "generation_batch_size": "rollouts_per_step",
    "gradient_accumulation_steps": "batch_size",
    "logging_steps": "log_every_steps",
    "max_completion_length": "max_tokens",
    "num_generations": "rollouts_per_example",
    "num_train_epochs": "max_steps",
    "per_device_train_batch_size": "micro_batch_size",
}
"""Options of TRL's `GRPOConfig` and the nearest option here, where their names have little in common."""

ARGUMENTS_FROM_TRL = {
    "args": "config=MultimodalRLConfig(...)",
    "processing_class": "tokenizer=",
    "peft_config": "config=MultimodalRLConfig(lora={'rank': 16}), or a model object with adapters",
}
"""Arguments of TRL's trainers, with what to pass to `MultimodalGRPOTrainer` instead."""


def refuse_unknown_arguments(names: Iterable[str]) -> None:
    """Raise ConfigurationError if there are names: `MultimodalGRPOTrainer` has no such arguments."""
    for name in names:
        option = NAMES_FROM_TRL.get(name, name if name in MultimodalRLConfig.model_fields else "")
        instead = ARGUMENTS_FROM_TRL.get(name) or (f"config=MultimodalRLConfig({option}=...)" if option else "")
        raise ConfigurationError(
            f"MultimodalGRPOTrainer has no argument {name!r}",
            code="unknown_argument",
            where="MultimodalGRPOTrainer",
            remedy=f"pass {instead}" if instead else "its docstring and docs/from-trl.md list the arguments",
        )


class _RolloutSettings(RolloutSettings):
    group_size: PositiveInt


class MultimodalRLConfig(BaseModel):
    """Options of `MultimodalGRPOTrainer`. Unknown options are errors.

    Each step plays `rollouts_per_step` episodes, in groups of `rollouts_per_example` episodes of the same task, and
    trains on them with the objective `mask_ratio` in updates of `batch_size` samples.

    Example:
        >>> config = MultimodalRLConfig(env_id="colors", max_steps=20, rollouts_per_step=64, batch_size=64)
        >>> config.group_size, config.settings().rollouts.groups_per_step
        (8, 8)
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True)

    output_dir: Path = Path("outputs")
    """Folder for checkpoints, published weights, rollouts and history.jsonl."""
    run_name: str | None = None
    """Name of the run, which becomes a subfolder of output_dir."""
    seed: NonNegativeInt = 42
    """Seed of the tasks, of sampling and of the trainer."""

    env_id: str = ""
    """Name of a registered environment; empty if set_environment is called."""
    env_args: dict[str, Any] = Field(default_factory=dict)
    """Settings of this environment."""
    env_tasks: PositiveInt = 1000
    """Number of training tasks that the environment generates."""
    max_steps: PositiveInt = 500
    """Number of training steps."""
    rollouts_per_step: PositiveInt = 512
    """Number of episodes of a step."""
    rollouts_per_example: PositiveInt | None = None
    """Number of episodes per task, whose rewards are compared with each other; 1 compares all episodes of a step. By
    default the greatest common divisor of rollouts_per_step and 8."""
    primary_reward_key: str | None = None
    """Reward part to train on instead of the sum of all parts."""
    temperature: PositiveFloat = 1.0
    """Temperature of sampling and of the trainer's log-probs."""
    max_tokens: PositiveInt = 512
    """Largest number of tokens that one turn may generate."""

    processes: PositiveInt | None = None
    """Number of ranks that train, each on one of the first GPUs. Several share the weights of a model that is given by
    name. By default one, or half of the GPUs if the training starts its servers; if all train, each GPU also serves."""
    lora: LoraSettings | None = None
    """Train low-rank adapters instead of the weights, {"rank": 16}, for a model that is given by name."""
    batch_size: PositiveInt = 512
    """Number of samples per optimizer update."""
    micro_batch_size: PositiveInt = 4
    """Largest number of samples of one forward pass."""
    max_tokens_per_micro_batch: PositiveInt = 16384
    """Largest number of padded tokens of one forward pass."""
    packing: bool = False
    """Pack the samples of a forward pass: compute shared prefixes and each distinct image once, and no padding. Needs
    the adapter of the model's family."""
    mask_ratio_low: NonNegativeFloat = 0.1
    """Tokens with a smaller importance ratio are dropped."""
    mask_ratio_high: PositiveFloat = 10.0
    """Tokens with a larger importance ratio are dropped."""
    aggregation: Aggregation = "sum"
    """Reduction of the tokens' losses to one number; the published trainer used the sum."""
    learning_rate: PositiveFloat = 5e-5
    """Peak learning rate of AdamW."""
    adam_beta1: float = 0.9
    """Decay of AdamW's first moment."""
    adam_beta2: float = 0.999
    """Decay of AdamW's second moment."""
    adam_epsilon: PositiveFloat = 1e-8
    """AdamW's epsilon."""
    weight_decay: NonNegativeFloat = 0.0
    """AdamW's weight decay."""
    max_grad_norm: PositiveFloat = 1.0
    """Gradients are clipped to this norm."""
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = "constant"
    """Decay of the learning rate after the warm-up."""
    warmup_steps: NonNegativeInt = 0
    """Number of steps over which the learning rate rises linearly from 0."""
    logprobs: Logprobs = "torch"
    """The backend that computes log-probs; triton needs a GPU."""
    torch_compile: bool = False
    """Compile the model's layers with torch.compile, which takes a minute or two."""
    bf16: bool = Field(default_factory=lambda: gpu_count() > 0)
    """Compute matrix products in bf16; the trained weights stay fp32. A model that is given by name is also loaded,
    published and served in bf16. By default it is so on GPUs."""
    gradient_checkpointing: Recomputation = "auto"
    """Recompute activations in the backward pass to save memory; a number between 0 and 1 does so in that part of the
    layers. "auto" does so in as many layers as a model that is given by name needs to fit in memory. The numbers are
    the same either way."""
    save_steps: PositiveInt = 500
    """Number of steps between checkpoints."""
    save_total_limit: PositiveInt = 2
    """Number of newest checkpoints to keep."""

    eval_steps: NonNegativeInt = 0
    """Number of steps between evaluations on held-out tasks; 0: no evaluations. The first one is before step 1, the
    last one after the last step, and the best weights become the result."""
    eval_tasks: PositiveInt = 64
    """Number of held-out tasks that each evaluation plays, always the same ones."""
    eval_temperature: float = Field(0.0, ge=0, le=2)
    """Temperature of sampling in evaluations; 0 is greedy."""
    eval_success_reward: float = 1.0
    """Smallest reward with which a held-out episode counts as solved."""
    eval_patience: NonNegativeInt = 0
    """Number of evaluations in a row without improvement after which the training ends; 0: it never ends early."""

    max_mismatch_kl: PositiveFloat = 1e-2
    """Largest KL between server and trainer before the first step; above it the training is refused."""
    vllm_server_host: str = "0.0.0.0"
    """Host of the vLLM server; 0.0.0.0 means this machine."""
    vllm_server_port: int = Field(8000, gt=0, lt=65536)
    """Port of the vLLM server."""
    vllm_server_timeout: PositiveFloat = 600.0
    """Seconds to wait for the server to be ready."""
    generation_timeout: PositiveFloat = 600.0
    """Seconds for one generation request."""
    max_concurrent: PositiveInt = 128
    """Number of episodes that are played concurrently."""
    sync_to_vllm_every: NonNegativeInt = 1
    """Number of steps between weight updates of the server; 0: never."""
    log_every_steps: PositiveInt = 10
    """Number of steps between printed lines of metrics. Without a terminal, so without a bar, the default is 1."""

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
                    remedy=f"set {NAMES_FROM_TRL[name]}, the nearest to TRL's option"
                    if name in NAMES_FROM_TRL
                    else suggestion(name, type(self).model_fields),
                )
        with explained(type(self), "MultimodalRLConfig"):
            super().__init__(**options)
            _ = self.machine
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
        """Number of episodes per task."""
        return self.rollouts_per_example or gcd(self.rollouts_per_step, DEFAULT_GROUP)

    @property
    def folder(self) -> Path:
        """Folder with the files of the run."""
        return self.output_dir / self.run_name if self.run_name else self.output_dir

    @property
    def server_url(self) -> str:
        """Base URL of the vLLM server."""
        host = "127.0.0.1" if self.vllm_server_host in ("0.0.0.0", "::") else self.vllm_server_host
        return f"http://{host}:{self.vllm_server_port}"

    @property
    def machine(self) -> Machine:
        """The options that belong to the section `machine` of a recipe."""
        return Machine(
            servers=MachineServers(endpoints=(self.server_url,)),
            limits=MachineLimits(
                ready_timeout=self.vllm_server_timeout,
                generation_timeout=self.generation_timeout,
                max_concurrent=self.max_concurrent,
            ),
        )

    def settings(self) -> LoopSettings:
        """Return the options as sections of a recipe.

        Raises:
            ConfigurationError: some options contradict each other.
        """
        n_groups = self.rollouts_per_step // self.group_size
        with explained(TrainerSettings, "MultimodalRLConfig"):
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

    def heldout_set(self) -> HeldoutSetSettings | None:
        """Return the settings of evaluations between steps; None without evaluations.

        Raises:
            ConfigurationError: eval_patience is set without eval_steps.
        """
        if self.eval_patience and not self.eval_steps:
            raise ConfigurationError(
                f"eval_patience = {self.eval_patience} has no effect, because there are no evaluations",
                code="patience_without_evaluations",
                remedy="set eval_steps, or omit eval_patience",
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
