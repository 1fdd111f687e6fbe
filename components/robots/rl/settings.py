"""Settings of the reinforcement learning of a robot policy: every value here can change the result. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Self

from pydantic import (
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    field_validator,
    model_validator,
)

from armature.components.contracts.settings import Settings
from armature.components.robots.evaluation.settings import (
    PlayerSettings,
    TrainLiberoEvaluationSettings,
    refuse_moved_objects,
)
from armature.components.robots.imitation.settings import Mode, PolicyUpdateSettings
from armature.components.robots.libero.settings import PerturbationSettings, ProSuite, SimulatorSettings, Suite
from armature.components.rollouts.settings import DEVIATION, Deviation
from armature.components.vlm.settings import CISPO, GSPO, PPO

NOISE_LEVEL, FLOW_SAMPLES = 0.5, 8


def _refuse(problems: Mapping[str, bool]) -> None:
    """Raise a ValueError with the first message in `problems` whose condition is true."""
    for message, applies in problems.items():
        if applies:
            raise ValueError(message)


class SuccessReward(Settings):
    """Reward 1 for the action chunk that solves the task, 0 for all others."""

    name: Literal["success"]
    """Selects this reward."""


class ProgressReward(Settings):
    """Reward 1 for success. A failed episode earns a part of that, in proportion to the progress at its end."""

    name: Literal["progress"]
    """Selects this reward."""
    weight: float = Field(0.5, gt=0, lt=1)
    """Factor of the final progress that a failed episode earns; below 1, so that success always earns more."""


class PotentialShaping(Settings):
    """Reward 1 for success, plus the change of progress over each chunk: potential-based shaping (Ng et al. 1999)."""

    name: Literal["potential"]
    """Selects this reward."""
    weight: PositiveFloat = 1.0
    """Factor of the shaping term gamma Phi(after) - Phi(before), where Phi is between 0 and 1."""


class RobotRolloutSettings(PlayerSettings):
    """Settings of the episodes that the policy plays in each training step.

    A step plays `groups_per_step` groups. All episodes of a group start from the same initial state, with the same
    perturbation if there is one.
    """

    model_config = ConfigDict(title="Rollouts")

    suite: Suite | ProSuite
    """LIBERO suite, or its variant in LIBERO-PRO, whose tasks are played."""
    perturbations: PerturbationSettings = PerturbationSettings()
    """Perturbations to train with. Every pair of task and initial state is played without any and with each of them."""
    groups_per_step: PositiveInt
    """Groups per step. Groups cycle through all pairs of task and initial state, with and without perturbations."""
    group_size: PositiveInt = 8
    """Episodes per group. The advantage compares episodes within a group."""
    max_steps: PositiveInt
    """Maximum number of actions of an episode."""
    likelihood: Literal["flow_sde", "fpo", "none"] = "flow_sde"
    """Sampling and scoring of continuous action chunks. flow_sde: one denoising step of each chunk is sampled at
    random, and its density is the likelihood. fpo: chunks are sampled as in an evaluation, and their flow-matching
    losses replace log-probs. none: chunks are sampled as in an evaluation and not scored; for the objective
    reward_weighted."""
    flow_samples: PositiveInt = FLOW_SAMPLES
    """fpo: flow times at which the loss of a chunk is computed, each with its own noise."""
    noise_level: float = Field(NOISE_LEVEL, ge=1e-3, le=10)
    """flow_sde: η, the scale of the noise in the one random denoising step of a chunk."""
    temperature: float = Field(1.0, ge=0.01, le=10)
    """Discrete actions: tokens are sampled from softmax(logits / temperature)."""
    max_rounds: PositiveInt = 1
    """1: every group is used. Larger: keep playing rounds of groups_per_step groups until that many groups have
    episodes with different rewards, but at most this many rounds (dynamic sampling)."""
    max_staleness: int = Field(0, ge=0, le=1)
    """0: rollouts and training alternate. 1: the next step is played while this one is trained, with weights that are
    one step older."""
    reward: SuccessReward | ProgressReward | PotentialShaping = Field(
        SuccessReward(name="success"), discriminator="name"
    )
    """Reward of an episode."""
    seed: NonNegativeInt = 0
    """Seed of the order of initial states, of the simulator and of all sampling."""
    failed_fraction: float = Field(0.25, ge=0, lt=1)
    """Largest share of a step's episodes (with max_rounds: of a round's) that may fail in all attempts. Failed episodes
    are counted and left out, and the rest of their group is compared without them. One more failure ends the
    training."""

    @model_validator(mode="after")
    def _check_sampling(self) -> Self:
        discrete, likelihood = self.inference_action_mode == "discrete", self.likelihood
        noisy = self.noise_level != NOISE_LEVEL
        problems = {
            "temperature is for action tokens, but the actions are continuous": not discrete
            and self.temperature != 1.0,
            f"likelihood {likelihood} is for flow matching, but the actions are tokens": discrete
            and likelihood != "flow_sde",
            "noise_level is for random denoising steps, but the actions are tokens": discrete and noisy,
            f"noise_level is for random denoising steps, not for likelihood {likelihood}": likelihood != "flow_sde"
            and noisy,
            "flow_samples is only used by likelihood fpo": likelihood != "fpo" and self.flow_samples != FLOW_SAMPLES,
        }
        _refuse({f"{message}: leave it out": applies for message, applies in problems.items()})
        return self


class EpisodeGroupMean(Settings):
    """Advantage of GRPO: an episode's reward less the mean of its group, divided by the group's standard deviation."""

    name: Literal["group_mean"]
    """Selects this advantage."""
    deviation: Deviation = Field("sample", description=DEVIATION)


class GAE(Settings):
    """Advantage of PPO: generalized advantage estimation over an episode's chunks, with a value head that is trained
    together with the policy."""

    name: Literal["gae"]
    """Selects this advantage."""
    gamma: float = Field(0.99, ge=0, le=1)
    """Discount factor per chunk."""
    gae_lambda: float = Field(0.95, ge=0, le=1)
    """GAE's lambda. 1: advantages from full returns. 0: advantages from one chunk's reward and the next value."""
    bootstrap_truncated: bool = True
    """true: when an episode runs out of actions, the value of its last observation is added to its return. false:
    nothing is added, as is right where finishing in time is part of the task."""
    value_lr: PositiveFloat = 1e-4
    """Peak learning rate of the value head."""
    value_loss_coef: PositiveFloat = 1.0
    """Factor of the value loss in the total loss."""
    value_clip: NonNegativeFloat = 0.2
    """Clip range of the value loss: moving a value farther than this from its value during the rollout does not lower
    the loss. 0: no clip."""
    huber_delta: PositiveFloat = 10.0
    """Value errors up to this size have a squared loss, larger ones a linear loss."""


class RewardWeighted(Settings):
    """Objective that imitates the policy's own action chunks by flow matching, each weighted by its episode's reward.

    It has no probability ratios. Source: reward-weighted regression (Peters & Schaal, ICML 2007).
    """

    name: Literal["reward_weighted"]
    """Selects this objective."""
    beta: NonNegativeFloat = 0.0
    """Temperature of the weight exp((R - best) / beta) of a chunk, where R is its episode's reward and best the largest
    reward of any episode. 0: chunks of solved episodes have weight 1 and all others are left out."""
    earlier_steps: NonNegativeInt = 0
    """Number of previous steps whose stored rollouts are trained on again in each step."""
    warmup_updates: NonNegativeInt = 0
    """Updates at the start of each step over which the learning rates rise linearly."""


class RobotRLTrainerSettings(PolicyUpdateSettings):
    """Settings of how the rollouts of a step update the policy."""

    model_config = ConfigDict(title="Trainer")

    max_steps: PositiveInt
    """Steps of the run. Each step plays new rollouts. The learning rate decay ends at the last step."""
    mode: Mode = "expert"
    """Weights to train. full: all. lora: adapters on the VLM and all of the action expert. lora_expert: adapters on
    both. expert: only the action expert."""
    objective: PPO | GSPO | CISPO | RewardWeighted = Field(PPO(name="ppo"), discriminator="name")
    """Policy loss and its parameters."""
    advantage: EpisodeGroupMean | GAE = Field(EpisodeGroupMean(name="group_mean"), discriminator="name")
    """Computation of a chunk's advantage."""
    ratio: Literal["chunk", "dimension", "token"] = "chunk"
    """Unit of a probability ratio: a whole action chunk (chunk), one number of it (dimension), or one of its tokens
    (token)."""
    kl_coefficient: NonNegativeFloat = 0.0
    """Coefficient of the KL divergence from the initial policy; 0: no KL term."""
    bc_coefficient: NonNegativeFloat = 0.0
    """Coefficient of the behavior cloning loss on chunks of solved episodes; 0: no such term."""
    target_kl: NonNegativeFloat = 0.0
    """Stop the updates of a step before an update whose mean KL divergence from the rollout policy exceeds this; 0:
    never stop early."""
    samples_per_update: NonNegativeInt = 0
    """Maximum number of chunks per optimizer update; chunks are spread evenly over updates. 0: one update with all."""
    epochs: PositiveInt = 1
    """Passes over the chunks of a step."""
    save_every: PositiveInt = 1
    """Steps between two checkpoints that a run can resume from."""

    @property
    def weighting(self) -> EpisodeGroupMean | GAE | RewardWeighted:
        """Settings that determine each chunk's weight in the loss: the reward-weighted objective, else the
        advantage."""
        return self.objective if isinstance(self.objective, RewardWeighted) else self.advantage

    @property
    def loads_again(self) -> bool:
        """True if a chunk is loaded more than once, so that caching its encoding pays."""
        return self.epochs > 1 or (isinstance(self.objective, RewardWeighted) and self.objective.earlier_steps > 0)

    @model_validator(mode="after")
    def _check_objective(self) -> Self:
        unused = ("kl_coefficient", "bc_coefficient", "target_kl", "ratio", "advantage")
        changed = [name for name in unused if getattr(self, name) != type(self).model_fields[name].default]
        _refuse(
            {
                f"{', '.join(changed)}: the objective reward_weighted has neither probability ratios nor advantages: "
                "leave this out": isinstance(self.objective, RewardWeighted) and bool(changed),
                "kl_coefficient needs mode expert: only the action expert of the initial policy is kept": bool(
                    self.kl_coefficient
                )
                and self.mode != "expert",
                "packing: micro_batch_size is 1, so there is nothing to pack: increase it, or leave packing out": (
                    self.packing is not None and self.micro_batch_size < 2
                ),
            }
        )
        return self


class RobotPreflightSettings(Settings):
    """Settings of the check, before the first step, that sampler and trainer compute the same probabilities."""

    model_config = ConfigDict(title="Pre-flight")

    max_ratio_error: PositiveFloat = 1e-5
    """Largest allowed distance from 1 of a chunk's probability ratio, trainer over sampler. If it is exceeded, the run
    stops before training."""


class TrainVLARLSettings(Settings):
    """Recipe sections of the stage train-vla-rl that the trained policy depends on."""

    simulator: SimulatorSettings
    rollouts: RobotRolloutSettings
    trainer: RobotRLTrainerSettings
    preflight: RobotPreflightSettings
    evaluation: TrainLiberoEvaluationSettings | None = None

    @field_validator("evaluation", mode="before")
    @classmethod
    def _drop_final_evaluation(cls, value: Any) -> Any:
        """Keep the fields of the evaluation during training. The final evaluation does not change the policy."""
        return value.heldout_set if isinstance(value, TrainLiberoEvaluationSettings) else value

    @model_validator(mode="after")
    def _check_policy(self) -> Self:
        refuse_moved_objects("rollouts", self.rollouts.perturbations, self.simulator)
        rollouts, trainer, evaluation = self.rollouts, self.trainer, self.evaluation
        discrete, weighted = rollouts.inference_action_mode == "discrete", isinstance(trainer.objective, RewardWeighted)
        kind, unit, other = ("discrete", "token", "dimension") if discrete else ("continuous", "dimension", "token")
        trains_vlm = trainer.mode != "expert"
        problems = {
            f"evaluation.{name}, rollouts.{name}: both use the same policy: set both or neither": (
                evaluation is not None and getattr(evaluation, name) != getattr(rollouts, name)
            )
            for name in ("torch_compile", "quantization")
        }
        _refuse(
            problems
            | {
                f"rollouts.quantization: trainer.mode {trainer.mode} trains the VLM in 16 bits: no ratio would be 1: "
                "leave rollouts.quantization out" + ("" if discrete else ", or set trainer.mode to expert"): (
                    rollouts.quantization is not None and not weighted and trains_vlm
                ),
                "trainer.mode expert only trains the action expert, but discrete actions come from the VLM: set "
                "trainer.mode to full or lora": discrete and not trains_vlm,
                "trainer.objective gspo averages the log-ratios of a chunk, but with trainer.ratio chunk there is only "
                f'one: set trainer.ratio to "{unit}", or use the objective ppo': (
                    trainer.ratio == "chunk" and trainer.objective.name == "gspo"
                ),
                f"trainer.ratio {trainer.ratio}: {kind} actions have no {other}: "
                f'set it to "{unit}" or "chunk"': trainer.ratio == other,
            }
        )
        if discrete:
            why = "rollouts.inference_action_mode discrete does not use the action expert"
            trainer.refuse_rates(("action_expert",), why, "rollouts.inference_action_mode = continuous")
        return self

    @model_validator(mode="after")
    def _check_objective(self) -> Self:
        rollouts, objective, advantage = self.rollouts, self.trainer.objective, self.trainer.advantage
        reward, weighted = rollouts.reward, isinstance(objective, RewardWeighted)
        only_solved = isinstance(objective, RewardWeighted) and not objective.beta
        fpo, searches = rollouts.likelihood == "fpo", rollouts.max_rounds > 1
        instead = "use the reward progress" + ("" if weighted else ", or trainer.advantage gae")
        _refuse(
            {
                f"trainer.objective {objective.name} needs log-probs, which rollouts.likelihood none does not compute: "
                "use flow_sde or fpo, or the objective reward_weighted": not weighted and rollouts.likelihood == "none",
                "trainer.objective reward_weighted is flow matching: "
                "set rollouts.inference_action_mode to continuous": weighted
                and rollouts.inference_action_mode == "discrete",
                "rollouts.likelihood fpo computes losses for probability ratios, but trainer.objective reward_weighted "
                "has no ratios: use none or flow_sde": weighted and fpo,
                "rollouts.max_rounds searches for groups whose episodes differ, but trainer.objective reward_weighted "
                "does not compare episodes: leave it out and play more groups": weighted and searches,
                "preflight: trainer.objective reward_weighted has no probability ratios to check: "
                "leave it out": weighted and self.preflight != RobotPreflightSettings(),
                "trainer.kl_coefficient needs densities, but rollouts.likelihood fpo only has losses: leave it out, or "
                "use the likelihood flow_sde": bool(self.trainer.kl_coefficient) and fpo,
                f"rollouts.reward {reward.name} has no effect, because trainer.objective only imitates solved "
                "episodes: set trainer.objective.beta, or use the reward success": only_solved
                and reward.name != "success",
                "rollouts.reward potential adds the same sum to all episodes of a group, so it does not change an "
                f"advantage over the group's mean: {instead}": (
                    isinstance(reward, PotentialShaping) and not isinstance(advantage, GAE)
                ),
                "rollouts.max_rounds chooses groups whose episodes differ, but trainer.advantage gae uses all "
                "episodes: leave it out": searches and not isinstance(advantage, EpisodeGroupMean),
                "rollouts.group_size is 1: an episode has no advantage over itself: set it to 2 or more": (
                    rollouts.group_size < 2 and isinstance(self.trainer.weighting, EpisodeGroupMean)
                ),
            }
        )
        return self
