"""Settings of an evaluation in LIBERO: tasks, episodes, sampling and seeds."""

from __future__ import annotations

from typing import ClassVar, Literal, Self

from pydantic import ConfigDict, Field, NonNegativeInt, PositiveInt, model_validator

from armature.components.contracts.settings import Settings
from armature.components.evaluation.settings import EvaluationSchedule
from armature.components.robots.libero.pro import ProSuite, base_suite
from armature.components.robots.libero.settings import PerturbationSettings, SimulatorSettings, Suite
from armature.components.robots.libero.starts import REST
from armature.components.robots.policies.settings import Quantization


class PlayingSettings(Settings):
    """Settings of playing in a simulator."""

    inference_action_mode: Literal["continuous", "discrete"] = "continuous"
    """Actions by flow matching (continuous) or as tokens (discrete). The policy must have been trained for this
    mode."""
    batch: PositiveInt = 32
    """Episodes played at the same time. Results do not depend on it."""
    rows_per_pass: PositiveInt = 8
    """Rows of one forward pass of the policy; missing rows are padded. The number changes the last bits of actions, and
    with them sampled actions. On a CPU 1 is best."""
    torch_compile: bool = False
    """Compile the policy's layers at its first answer, which takes half a minute on a GPU and changes the last bits of
    actions."""
    quantization: Quantization | None = None
    """fp8: compute the matrix products of the text layers in 8 bits, for a policy in bfloat16 on an H100 or newer.
    Actions change a little. Slower on a CPU. With trainer.mode expert the trainer uses the same precision as its
    rollouts; evaluations have their own setting."""
    attempts: PositiveInt = 3
    """Attempts at an episode whose simulator dies."""


class PlayerSettings(PlayingSettings):
    """Settings of playing in LIBERO, for an evaluation or for rollouts to train on."""

    tasks: tuple[NonNegativeInt, ...] = ()
    """Numbers of the tasks in each suite; empty: all."""
    initial_states: tuple[NonNegativeInt, ...] = ()
    """Stored initial states that episodes start from; empty: all. Evaluate with others than those used in training."""
    play_broken_starts: bool = False
    """Also play tasks that do not begin as their files say: an object is not on or in the other one, or the goal holds
    already. false: such a task is an error."""

    @model_validator(mode="after")
    def _listed_once(self) -> Self:
        for name in ("suites", "tasks", "initial_states"):
            listed = getattr(self, name, ())
            if len(set(listed)) < len(listed):
                raise ValueError(f"{name}: {', '.join(map(str, listed))}: list each value once")
        return self


class PolicyEvaluationSettings(PlayingSettings):
    """Settings of an evaluation in any simulator: how the policy is asked, and how many episodes may fail."""

    n_action_steps: PositiveInt | None = None
    """Actions of a chunk that are executed before the next chunk; none: the policy's own setting."""
    num_inference_steps: PositiveInt | None = None
    """Number of Euler steps of the sampler; none: the policy's own setting."""
    image_attention_at_inference: Literal["bidirectional", "as_trained"] | None = None
    """Attention among image tokens of the prompt; none: the policy's own setting."""
    eval_seed: NonNegativeInt = 1000
    """Seed of the noise that actions are sampled from."""
    per_episode_seed: bool = True
    """true: each episode has its own noise. false: chunk k of every episode starts from the same noise."""
    failed_episodes: NonNegativeInt = 0
    """Episodes that may fail in all attempts; they count as not solved. One more ends the evaluation."""


class LiberoEvaluationSettings(PolicyEvaluationSettings, PlayerSettings):
    """Settings of an evaluation. Every task of the suites is played `episodes_per_task` times."""

    model_config = ConfigDict(title="Evaluation in LIBERO")

    AFTER_TRAINING: ClassVar = ("episodes_per_task", "videos_per_task", "video_fps", "perturbations")
    """Settings that only affect the evaluation after a training, not those during it."""

    suites: tuple[Suite | ProSuite, ...] = Field(
        ("libero_10", "libero_goal", "libero_object", "libero_spatial"), min_length=1
    )
    """Suites to play, in this order. Names with swap, object, lan or task at their end are LIBERO-PRO's."""
    episodes_per_task: PositiveInt = 50
    """Episodes of each task. Episode k starts from initial state k modulo the number of states (50), so every state is
    used once before any repeats."""
    max_steps: dict[Suite, PositiveInt] = Field(
        {"libero_spatial": 280, "libero_object": 280, "libero_goal": 300, "libero_10": 520, "libero_90": 400}
    )
    """Maximum number of actions of an episode, per suite of LIBERO; waiting steps are not counted. LIBERO-PRO's suites
    have the numbers of the suites they vary."""
    seed: NonNegativeInt = Field(1000, lt=2**31)
    """Seed of the simulator; episode k of a task uses seed + k."""
    videos_per_task: NonNegativeInt = 2
    """Videos of the first successes of each task and of each perturbation, and the same number of first failures."""
    video_fps: PositiveInt = 20
    """Frames per second of videos; the simulator's control_freq gives real time."""
    perturbations: PerturbationSettings = PerturbationSettings()
    """Perturbations. With each of them every episode is played again, from the same state and with the same noise."""

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if missing := [suite for suite in self.suites if base_suite(suite) not in self.max_steps]:
            raise ValueError(f"max_steps has no entry for {', '.join(missing)}")
        return self


class TrainLiberoEvaluationSettings(EvaluationSchedule, LiberoEvaluationSettings):
    """Evaluation of the trained policy, and with `every` also evaluations during training, every so many steps.

    Both use the same seeds. Nothing but the initial noise of the sampler is random.
    """

    heldout_episodes: PositiveInt = 20
    """Episodes of each task that are played during training: always the same, the first ones."""

    @model_validator(mode="after")
    def _heldout_episodes_need_evaluations(self) -> Self:
        if self.heldout_episodes != type(self).model_fields["heldout_episodes"].default and not self.every:
            raise ValueError(
                f"heldout_episodes = {self.heldout_episodes} are for evaluations during training, but every is not "
                "set: set every, or leave heldout_episodes out"
            )
        return self

    @property
    def heldout_set(self) -> Self | None:
        """Settings of the evaluations during training, which the trained policy depends on; None without `every`."""
        if not self.every:
            return None
        left = {name: type(self).model_fields[name].default for name in self.AFTER_TRAINING}
        return self.model_copy(update=left | {"episodes_per_task": self.heldout_episodes})


def refuse_moved_objects(section: str, moved: PerturbationSettings, simulator: SimulatorSettings) -> None:
    """Raise a ValueError if the simulator waits too briefly for the perturbations of a section, which move objects."""
    if (moved.layout or moved.distractors) and simulator.num_steps_wait < REST:
        raise ValueError(
            f"simulator.num_steps_wait is {simulator.num_steps_wait}: {section}.perturbations.layout and distractors "
            f"move objects that must be at rest, which takes {REST} steps: increase it to {REST}, or leave these "
            "perturbations out"
        )


class EvaluateLiberoStageSettings(Settings):
    """Recipe sections of the stage evaluate-libero."""

    simulator: SimulatorSettings
    evaluation: LiberoEvaluationSettings

    @model_validator(mode="after")
    def _objects_rest(self) -> Self:
        refuse_moved_objects("evaluation", self.evaluation.perturbations, self.simulator)
        return self


class CompareLiberoSettings(Settings):
    """Settings of the comparison of two evaluations."""

    confidence: float = Field(0.95, gt=0.0, lt=1.0)
    """Confidence level of the intervals."""
