"""What decides the outcome of reinforcement learning of a robot policy. Torch-free."""

from __future__ import annotations

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
from armature.components.robots.evaluation.settings import PlayerSettings, TrainLiberoEvaluationSettings
from armature.components.robots.imitation.settings import Mode, PolicyUpdateSettings
from armature.components.robots.libero.settings import SimulatorSettings, Suite
from armature.components.rollouts.settings import DEVIATION, Deviation
from armature.components.vlm.settings import CISPO, GSPO, PPO

NOISE_LEVEL, FLOW_SAMPLES = 0.5, 8


class SuccessReward(Settings):
    """1 for the answer that solves the task, 0 for all others."""

    name: Literal["success"]
    """Which reward: success."""


class ProgressReward(Settings):
    """Success, and for an episode that fails a part of it, by how far the task has come."""

    name: Literal["progress"]
    """Which reward: progress."""
    weight: float = Field(0.5, gt=0, lt=1)
    """Times the progress at the end, below 1: what an episode that fails earns."""


class PotentialShaping(Settings):
    """Success, and with every answer the difference of progress: potential-based shaping (Ng et al. 1999)."""

    name: Literal["potential"]
    """Which reward: potential."""
    weight: PositiveFloat = 1.0
    """Times gamma Phi(after) - Phi(before), Phi from 0 to 1."""


class RobotRolloutSettings(PlayerSettings):
    """Every step plays `groups_per_step` groups; the episodes of a group begin in the same initial state."""

    model_config = ConfigDict(title="Rollouts")

    suite: Suite
    """The suite whose tasks are played."""
    groups_per_step: PositiveInt
    """Groups of a step; tasks and initial states take turns."""
    group_size: PositiveInt = 8
    """Episodes of a group, which are compared with each other."""
    max_steps: PositiveInt
    """Actions of an episode at most."""
    likelihood: Literal["flow_sde", "fpo", "none"] = "flow_sde"
    """Continuous actions: flow_sde: one denoising step of an answer is drawn, and its density counts. fpo: answers are
    those of an evaluation, and their flow-matching losses stand for log-probs. none: answers are those of an
    evaluation, for the objective reward_weighted."""
    flow_samples: PositiveInt = FLOW_SAMPLES
    """fpo: times at which an answer's loss is computed, each with a noise of its own."""
    noise_level: float = Field(NOISE_LEVEL, ge=1e-3, le=10)
    """flow_sde: its η, how widely the one random denoising step of an answer is drawn."""
    temperature: float = Field(1.0, ge=0.01, le=10)
    """Discrete actions: tokens are drawn from softmax(logits / temperature)."""
    max_rounds: PositiveInt = 1
    """1: every group counts as it is. More: further groups are played, groups_per_step in each round, until as many
    have rewards that differ, or after so many rounds (dynamic sampling)."""
    max_staleness: int = Field(0, ge=0, le=1)
    """0: play and train in turn; 1: play the next step, by weights one step older, meanwhile."""
    reward: SuccessReward | ProgressReward | PotentialShaping = Field(
        SuccessReward(name="success"), discriminator="name"
    )
    """What an episode earns."""
    seed: NonNegativeInt = 0
    """Seed of the order of initial states, the simulator and all noise."""
    failed_fraction: float = Field(0.25, ge=0, lt=1)
    """Of the episodes of a step (with max_rounds: of a round), those that may fail in all attempts: they are left out
    and counted, and the others of their group compared. One more ends the training."""

    @model_validator(mode="after")
    def _randomness_is_of_its_mode(self) -> Self:
        if self.inference_action_mode == "continuous" and self.temperature != 1.0:
            raise ValueError("temperature draws action tokens, and these actions are continuous: leave it out")
        if self.inference_action_mode == "discrete" and self.likelihood != "flow_sde":
            raise ValueError(
                f"likelihood {self.likelihood} is of flow matching, and these actions are tokens: leave it out"
            )
        if self.inference_action_mode == "discrete" and self.noise_level != NOISE_LEVEL:
            raise ValueError("noise_level draws a denoising step, and these actions are tokens: leave it out")
        if self.likelihood != "flow_sde" and self.noise_level != NOISE_LEVEL:
            raise ValueError(
                f"noise_level draws a denoising step, and with likelihood {self.likelihood} none is: leave it out"
            )
        if self.likelihood != "fpo" and self.flow_samples != FLOW_SAMPLES:
            raise ValueError("flow_samples are those of likelihood fpo: leave it out")
        return self


class EpisodeGroupMean(Settings):
    """An episode is as good as it is better than the mean of its group, in its standard deviations: GRPO."""

    name: Literal["group_mean"]
    """Which advantage: group_mean."""
    deviation: Deviation = Field("sample", description=DEVIATION)


class GAE(Settings):
    """Generalized advantage estimation over an episode's chunks, with a value head that is trained along: PPO."""

    name: Literal["gae"]
    """Which advantage: gae."""
    gamma: float = Field(0.99, ge=0, le=1)
    """Discount per chunk."""
    gae_lambda: float = Field(0.95, ge=0, le=1)
    """1: advantages are of returns; 0: of one chunk and the next value."""
    bootstrap_truncated: bool = True
    """An episode whose actions are used up goes on with the value of its last observation; false: it is worth nothing
    from there, as where the time is part of the task."""
    value_lr: PositiveFloat = 1e-4
    """Peak learning rate of the value head."""
    value_loss_coef: PositiveFloat = 1.0
    """The value's loss is multiplied by it."""
    value_clip: NonNegativeFloat = 0.2
    """A value earns nothing by moving farther than this from that of the rollout; 0: no clip."""
    huber_delta: PositiveFloat = 10.0
    """Errors of the value up to this are squared, larger ones count linearly."""


class RewardWeighted(Settings):
    """Flow matching on the policy's own answers, each weighed by what its episode earned; there are no probability
    ratios: reward-weighted regression (Peters & Schaal, ICML 2007)."""

    name: Literal["reward_weighted"]
    """Which objective: reward_weighted."""
    beta: NonNegativeFloat = 0.0
    """An answer is weighted by exp((R - best) / beta), where R is what its episode earned, and best the most that one
    earned; 0: answers of solved episodes have weight 1, others are left out."""
    earlier_steps: NonNegativeInt = 0
    """So many steps before this one are trained on again, with their rollouts as they were."""
    warmup_updates: NonNegativeInt = 0
    """Updates at the beginning of each step over which learning rates rise linearly."""


class RobotRLTrainerSettings(PolicyUpdateSettings):
    """How a step's answers become updates."""

    model_config = ConfigDict(title="Trainer")

    max_steps: PositiveInt
    """Steps of the run, each of new rollouts; the decay ends there."""
    mode: Mode = "expert"
    """full: all weights. lora: adapters on the VLM, all of the action expert. lora_expert: adapters on both. expert:
    the action expert alone."""
    objective: PPO | GSPO | CISPO | RewardWeighted = Field(PPO(name="ppo"), discriminator="name")
    """The loss and its parameters."""
    advantage: EpisodeGroupMean | GAE = Field(EpisodeGroupMean(name="group_mean"), discriminator="name")
    """How good an answer was."""
    ratio: Literal["chunk", "dimension", "token"] = "chunk"
    """What has a probability ratio of its own: a chunk of actions, each of its numbers (dimension), or each of its
    tokens (token)."""
    kl_coefficient: NonNegativeFloat = 0.0
    """Weight of the KL divergence to the policy that the training began with; 0: none."""
    bc_coefficient: NonNegativeFloat = 0.0
    """Weight of the behavior cloning of answers from episodes that solved their task; 0: none."""
    target_kl: NonNegativeFloat = 0.0
    """End a step's updates before one whose probability ratios have a larger mean KL divergence from the policy that
    played; 0: make all of them."""
    samples_per_update: NonNegativeInt = 0
    """Answers per optimizer update at most, spread evenly; 0: all of the step."""
    epochs: PositiveInt = 1
    """How often a step's answers are trained on."""
    save_every: PositiveInt = 1
    """Steps between checkpoints to resume from."""

    @property
    def weighting(self) -> EpisodeGroupMean | GAE | RewardWeighted:
        """What says how much an answer counts."""
        return self.objective if isinstance(self.objective, RewardWeighted) else self.advantage

    @property
    def loads_again(self) -> bool:
        """Whether an answer is trained on more than once."""
        return self.epochs > 1 or (isinstance(self.objective, RewardWeighted) and self.objective.earlier_steps > 0)

    @model_validator(mode="after")
    def _ratios_are_known(self) -> Self:
        if isinstance(self.objective, RewardWeighted):
            own = ("kl_coefficient", "bc_coefficient", "target_kl", "ratio", "advantage")
            defaults = {name: type(self).model_fields[name].default for name in own}
            if given := [name for name, default in defaults.items() if getattr(self, name) != default]:
                raise ValueError(
                    f"{', '.join(given)}: the objective reward_weighted has neither probability ratios nor advantages, "
                    "leave this out"
                )
        return self

    @model_validator(mode="after")
    def _start_can_be_kept(self) -> Self:
        if self.kl_coefficient and self.mode != "expert":
            raise ValueError("kl_coefficient needs mode expert: of the first policy the action expert alone is kept")
        return self

    @model_validator(mode="after")
    def _something_is_packed(self) -> Self:
        if self.packing is not None and self.micro_batch_size < 2:
            raise ValueError("packing: a forward pass has micro_batch_size 1 answer, take more of them or no packing")
        return self


class RobotPreflightSettings(Settings):
    """What sampler and trainer must agree on before the first step."""

    model_config = ConfigDict(title="Pre-flight")

    max_ratio_error: PositiveFloat = 1e-5
    """Refuse to train where an answer's probability ratio, trainer over sampler, is farther from 1."""


class TrainVLARLSettings(Settings):
    """The sections that the trained policy depends on."""

    simulator: SimulatorSettings
    rollouts: RobotRolloutSettings
    trainer: RobotRLTrainerSettings
    preflight: RobotPreflightSettings
    evaluation: TrainLiberoEvaluationSettings | None = None

    @field_validator("evaluation", mode="before")
    @classmethod
    def _what_is_played_during_training(cls, value: Any) -> Any:
        """Of the section: how the trained policy is evaluated does not change it."""
        return value.heldout_set if isinstance(value, TrainLiberoEvaluationSettings) else value

    @model_validator(mode="after")
    def _one_policy_plays(self) -> Self:
        for name in ("torch_compile", "quantization"):
            if self.evaluation is not None and getattr(self.evaluation, name) != getattr(self.rollouts, name):
                raise ValueError(f"evaluation.{name}, rollouts.{name}: one policy plays both, set both or neither")
        return self

    @model_validator(mode="after")
    def _both_sides_compute_alike(self) -> Self:
        ratios = not isinstance(self.trainer.objective, RewardWeighted)
        if self.rollouts.quantization is not None and ratios and self.trainer.mode != "expert":
            discrete = self.rollouts.inference_action_mode == "discrete"
            raise ValueError(
                f"rollouts.quantization: trainer.mode {self.trainer.mode} trains the VLM, in 16 bits, so that no ratio "
                "is 1: leave rollouts.quantization out" + ("" if discrete else ", or set trainer.mode to expert")
            )
        return self

    @model_validator(mode="after")
    def _actions_are_trained(self) -> Self:
        discrete = self.rollouts.inference_action_mode == "discrete"
        if discrete and self.trainer.mode == "expert":
            raise ValueError(
                "trainer.mode expert trains the action expert alone, and discrete actions come from the VLM: set "
                "trainer.mode to full or lora"
            )
        if discrete:
            why = "rollouts.inference_action_mode discrete never asks the action expert"
            self.trainer.refuse_rates(("action_expert",), why, "rollouts.inference_action_mode = continuous")
        if self.trainer.ratio == "chunk" and self.trainer.objective.name == "gspo":
            raise ValueError(
                "trainer.objective gspo has the mean of an answer's log-ratios, and trainer.ratio chunk leaves it a "
                f'single one: set trainer.ratio to "{"token" if discrete else "dimension"}", or take the objective ppo'
            )
        if self.trainer.ratio == ("dimension" if discrete else "token"):
            other = "token" if discrete else "dimension"
            raise ValueError(
                f"trainer.ratio {self.trainer.ratio}: {'discrete' if discrete else 'continuous'} actions have a "
                f'{other}, set "{other}" or "chunk"'
            )
        return self

    @model_validator(mode="after")
    def _imitation_is_of_flow_matching(self) -> Self:
        played = self.rollouts.likelihood
        if not isinstance(self.trainer.objective, RewardWeighted):
            if played == "none":
                raise ValueError(
                    f"trainer.objective {self.trainer.objective.name} needs log-probs, and rollouts.likelihood none "
                    "has none: take flow_sde or fpo, or the objective reward_weighted"
                )
            return self
        if self.rollouts.inference_action_mode == "discrete":
            raise ValueError(
                "trainer.objective reward_weighted is flow matching: rollouts' actions are to be continuous"
            )
        if played == "fpo":
            raise ValueError(
                "rollouts.likelihood fpo computes losses for probability ratios, and trainer.objective reward_weighted "
                "has none: take none or flow_sde"
            )
        if self.rollouts.max_rounds > 1:
            raise ValueError(
                "rollouts.max_rounds looks for groups whose episodes differ, and trainer.objective reward_weighted "
                "compares none: leave it out, play more groups"
            )
        if self.preflight != RobotPreflightSettings():
            raise ValueError(
                "preflight: trainer.objective reward_weighted has no probability ratios to be checked, leave it out"
            )
        return self

    @model_validator(mode="after")
    def _divergence_is_known(self) -> Self:
        if self.trainer.kl_coefficient and self.rollouts.likelihood == "fpo":
            raise ValueError(
                "trainer.kl_coefficient needs densities, and rollouts.likelihood fpo has losses alone: leave it out, "
                "or take the likelihood flow_sde"
            )
        return self

    @model_validator(mode="after")
    def _shaping_matters(self) -> Self:
        reward, trainer = self.rollouts.reward, self.trainer
        imitates = isinstance(trainer.objective, RewardWeighted)
        if isinstance(trainer.objective, RewardWeighted) and not trainer.objective.beta and reward.name != "success":
            raise ValueError(
                f"rollouts.reward {reward.name} changes nothing where trainer.objective imitates solved episodes "
                "alone: set trainer.objective.beta, or take the reward success"
            )
        if isinstance(reward, PotentialShaping) and not isinstance(trainer.advantage, GAE):
            raise ValueError(
                "rollouts.reward potential gives all episodes of a group the same in sum, so it changes no advantage "
                f"over the group's mean: take the reward progress{'' if imitates else ', or trainer.advantage gae'}"
            )
        return self

    @model_validator(mode="after")
    def _groups_can_differ(self) -> Self:
        if self.rollouts.max_rounds > 1 and not isinstance(self.trainer.advantage, EpisodeGroupMean):
            raise ValueError(
                "rollouts.max_rounds chooses groups whose episodes differ, and with trainer.advantage gae all episodes "
                "count: leave it out"
            )
        if self.rollouts.group_size < 2 and isinstance(self.trainer.weighting, EpisodeGroupMean):
            raise ValueError("rollouts.group_size is 1: an episode has no advantage over itself, take 2 at least")
        return self
