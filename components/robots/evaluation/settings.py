"""What a robot policy is evaluated on in LIBERO, and by which seeds."""

from __future__ import annotations

from typing import ClassVar, Literal, Self

from pydantic import ConfigDict, Field, NonNegativeInt, PositiveInt, model_validator

from armature.components.contracts.settings import Settings
from armature.components.evaluation.settings import EvaluationSchedule
from armature.components.robots.libero.settings import PerturbationSettings, SimulatorSettings, Suite
from armature.components.robots.policies.settings import Quantization

REST = 10
"""Steps in which the objects of a stored state have fallen on what they stand on."""


class PlayerSettings(Settings):
    """How a policy plays in LIBERO, to be evaluated or to be trained on what it does."""

    tasks: tuple[NonNegativeInt, ...] = ()
    """Numbers of tasks in each suite; empty: all."""
    initial_states: tuple[NonNegativeInt, ...] = ()
    """Stored initial states that episodes begin in; empty: all. Evaluate with others than those that are trained on."""
    inference_action_mode: Literal["continuous", "discrete"] = "continuous"
    """Actions by flow matching, or as tokens; the policy must have been trained for it."""
    batch: PositiveInt = 32
    """Episodes that are played at once. No result depends on it."""
    rows_per_pass: PositiveInt = 8
    """Rows of one forward pass of the policy, filled up where fewer wait; it moves the last bits, and with them sampled
    actions. 1 is best on a CPU."""
    torch_compile: bool = False
    """Compile the policy's layers at its first answer, which takes half a minute on a GPU; it moves the last bits."""
    quantization: Quantization | None = None
    """fp8: products of the text layers in 8 bits, for a policy in bfloat16 on an H100 or newer; actions move a little.
    Slower on a CPU. A trainer of the expert alone computes as its rollouts do; evaluations have their own setting."""
    attempts: PositiveInt = 3
    """How often an episode is begun whose simulator dies on the way."""

    @model_validator(mode="after")
    def _listed_once(self) -> Self:
        for name in ("suites", "tasks", "initial_states"):
            listed = getattr(self, name, ())
            if len(set(listed)) < len(listed):
                raise ValueError(f"{name}: {', '.join(map(str, listed))}: name each once")
        return self


class LiberoEvaluationSettings(PlayerSettings):
    """Every task of the suites is played `episodes_per_task` times."""

    model_config = ConfigDict(title="Evaluation in LIBERO")

    AFTER_TRAINING: ClassVar = ("episodes_per_task", "videos_per_task", "video_fps", "perturbations")
    """Settings that matter only to the evaluation after a training, not to those during it."""

    suites: tuple[Suite, ...] = Field(("libero_10", "libero_goal", "libero_object", "libero_spatial"), min_length=1)
    """Suites, played in this order."""
    episodes_per_task: PositiveInt = 50
    """Episodes of each task; episode k begins in initial state k modulo their number (50), so that every state comes
    once before any repeats."""
    max_steps: dict[Suite, PositiveInt] = Field(
        {"libero_spatial": 280, "libero_object": 280, "libero_goal": 300, "libero_10": 520, "libero_90": 400}
    )
    """Actions of an episode at most, per suite; steps of waiting are not counted."""
    n_action_steps: PositiveInt | None = None
    """Actions of a chunk that are carried out before the next; none: the policy's own."""
    num_inference_steps: PositiveInt | None = None
    """Euler steps; none: the policy's own."""
    image_attention_at_inference: Literal["bidirectional", "as_trained"] | None = None
    """How the prompt's images attend to each other; none: as the policy says."""
    eval_seed: NonNegativeInt = 1000
    """Seed of the noise that the policy's actions are sampled from."""
    per_episode_seed: bool = True
    """Each episode draws noise of its own; else chunk k of every episode begins with the same noise."""
    seed: NonNegativeInt = Field(1000, lt=2**31)
    """Seed of the simulator; episode k of a task has seed + k."""
    failed_episodes: NonNegativeInt = 0
    """Episodes that may fail in all attempts (they count as not solved); one more ends the evaluation."""
    videos_per_task: NonNegativeInt = 2
    """Videos of the first successes of each task and of each perturbation, and as many of the first failures."""
    video_fps: PositiveInt = 20
    """Frames per second; the simulator's control_freq is real time."""
    perturbations: PerturbationSettings = PerturbationSettings()
    """Every episode is played again, from the same state and with the same noise, with each of them."""

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if missing := [suite for suite in self.suites if suite not in self.max_steps]:
            raise ValueError(f"max_steps has no entry for {', '.join(missing)}")
        return self


class TrainLiberoEvaluationSettings(EvaluationSchedule, LiberoEvaluationSettings):
    """An evaluation of the trained policy, and with `every` one of each so many steps while it trains.

    Both play by the same seeds, and draw nothing but the noise that answers begin with.
    """

    heldout_episodes: PositiveInt = 20
    """Episodes of each task that are played during training: the first ones, each time the same."""

    @model_validator(mode="after")
    def _heldout_episodes_need_evaluations(self) -> Self:
        if self.heldout_episodes != type(self).model_fields["heldout_episodes"].default and not self.every:
            raise ValueError(
                f"heldout_episodes = {self.heldout_episodes} are played during training, and nothing is: set every, or "
                "leave heldout_episodes out"
            )
        return self

    @property
    def heldout_set(self) -> Self | None:
        """What the training depends on; None without evaluations during it."""
        if not self.every:
            return None
        left = {name: type(self).model_fields[name].default for name in self.AFTER_TRAINING}
        return self.model_copy(update=left | {"episodes_per_task": self.heldout_episodes})


class EvaluateLiberoStageSettings(Settings):
    """The sections that the result depends on."""

    simulator: SimulatorSettings
    evaluation: LiberoEvaluationSettings

    @model_validator(mode="after")
    def _objects_rest(self) -> Self:
        moved, waits = self.evaluation.perturbations, self.simulator.num_steps_wait
        if (moved.layout or moved.distractors) and waits < REST:
            raise ValueError(
                f"simulator.num_steps_wait is {waits}: perturbations.layout and distractors move objects that have "
                f"come to rest, which takes {REST} steps; wait longer, or leave them out"
            )
        return self


class CompareLiberoSettings(Settings):
    """How two evaluations are compared."""

    confidence: float = Field(0.95, gt=0.0, lt=1.0)
    """Confidence level of the intervals."""
