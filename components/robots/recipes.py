"""Recipes of robots: statistics, demonstrations, training on data and on rewards, and evaluation in LIBERO."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Self

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from armature.components.configuration.recipes import MachineSection, Sections
from armature.components.contracts.machine import Machine
from armature.components.contracts.stages import Artifact
from armature.components.robots.datasets.settings import (
    AugmentStatsSettings,
    DatasetSettings,
    LayoutSettings,
    QuantileStatsSettings,
)
from armature.components.robots.evaluation.settings import (
    CompareLiberoSettings,
    EvaluateLiberoStageSettings,
    LiberoEvaluationSettings,
    TrainLiberoEvaluationSettings,
)
from armature.components.robots.imitation.settings import TrainVLASettings, VLATrainerSettings
from armature.components.robots.libero.settings import DemonstrationSettings, SimulatorSettings
from armature.components.robots.policies.settings import RobotPolicySettings
from armature.components.robots.rl.settings import (
    RewardWeighted,
    RobotPreflightSettings,
    RobotRLTrainerSettings,
    RobotRolloutSettings,
    TrainVLARLSettings,
)
from armature.components.training.processes import TrainerProcesses

PLANNING = "armature.components.robots.planning"

SimulatorSection = Annotated[SimulatorSettings, Field(description="How LIBERO is simulated and drawn.")]
LiberoEvaluationSection = Annotated[
    LiberoEvaluationSettings, Field(description="Which tasks are played, how often, and by which seeds.")
]
StatisticsSection = Annotated[
    QuantileStatsSettings, Field(description="Which features are measured, and which frames of images.")
]


class QuantileStats(Sections):
    """Minimum, maximum, mean, std and quantiles of every feature, of each episode and of all."""

    FLOW = "armature.flows.quantile_stats.quantile_stats"

    dataset: DatasetSettings
    """The dataset, or several. What is there now is what is measured."""
    statistics: StatisticsSection
    augment: AugmentStatsSettings
    """Whether the dataset gets the statistics."""
    machine: MachineSection = Machine()


class Demonstrations(Sections):
    """A LeRobot dataset of the episodes in which the scripted policy reached its goal, in LIBERO."""

    FLOW = "armature.flows.demonstrations.demonstrations"

    simulator: SimulatorSection
    demonstrations: DemonstrationSettings
    """Which tasks are demonstrated, and how often."""
    layout: LayoutSettings
    """How the dataset is stored."""
    machine: MachineSection = Machine()


class TrainVla(Sections):
    """A dataset, its statistics and a policy, training, and an evaluation of the result in the simulator.

    The data are a dataset, or demonstrations that a scripted policy gives in the simulator: one of the two. A robot
    that is not LIBERO's has no evaluation: the error of held-out actions is the measure then.
    """

    FLOW = "armature.flows.train_vla.train_vla"
    JOINED = (TrainVLASettings, EvaluateLiberoStageSettings)
    FIRST_STAGES = ("policy",)
    MEMORY = f"{PLANNING}:recipe_memory"

    policy: RobotPolicySettings
    """Where the weights come from, and what the policy is told of the robot."""
    statistics: StatisticsSection
    training: VLATrainerSettings
    """What of the policy is trained, and how."""
    machine: MachineSection = Machine()
    simulator: SimulatorSettings | None = None
    """How LIBERO is simulated and drawn, for demonstrations and the evaluation."""
    evaluation: LiberoEvaluationSettings | None = None
    """Which tasks the result plays, how often, and by which seeds; leave it out for none."""
    dataset: DatasetSettings | None = None
    """The dataset, or several to be mixed."""
    demonstrations: DemonstrationSettings | None = None
    """What the scripted policy demonstrates, in place of a dataset."""
    layout: LayoutSettings | None = None
    """How the demonstrations are stored; goes with them."""
    comparison: CompareLiberoSettings | None = None
    """Evaluates the policy before training as well, and compares; it has to know the robot then."""

    @model_validator(mode="after")
    def _fit_together(self) -> Self:
        if (self.dataset is None) == (self.demonstrations is None):
            given = "neither is" if self.dataset is None else "both are"
            raise PydanticCustomError(
                "one_kind_of_data",
                f"a policy is trained on a dataset or on demonstrations, and {given} given: keep one of these sections",
            )
        if (self.demonstrations is None) != (self.layout is None):
            raise PydanticCustomError(
                "sections_incomplete", "the sections demonstrations and layout go together: give both, or neither"
            )
        if (self.simulator is None) != (self.evaluation is None and self.demonstrations is None):
            raise PydanticCustomError(
                "sections_incomplete",
                "the section simulator goes with demonstrations and evaluation: "
                + ("add it" if self.simulator is None else "leave it out, or add one of them"),
            )
        if self.comparison is not None and self.evaluation is None:
            raise PydanticCustomError(
                "sections_incomplete",
                "comparison is of two evaluations: add the section evaluation, or leave comparison out",
            )
        _refuse_quantization("evaluation", self.evaluation, "policy", self.policy)
        if self.evaluation is None and self.training.heldout is None:
            raise PydanticCustomError(
                "nothing_measured",
                "nothing measures the result: add training.heldout = { fraction = 0.1 }, or, for LIBERO's robot, the "
                "section evaluation",
            )
        return self

    def refuse_sources(self) -> None:
        _refuse_unnamed(self.policy)

    def refuse_ahead(self) -> None:
        from armature.components.robots.evaluation.schedule import refuse_episodes

        if self.evaluation is not None and self.simulator is not None:
            refuse_episodes(self.evaluation, self.simulator)

    def check_stages(self, inputs: Mapping[str, Artifact], say: Callable[[str], None]) -> None:
        from armature.components.configuration.stages import run_stage

        if self.evaluation is not None and self.dataset is not None:
            self.refuse_other_robot(run_stage("dataset", self.dataset, {}, self.machine))
            say("dataset: its robot is the simulator's")

    def refuse_other_robot(self, data: Artifact) -> None:
        """
        Raises:
            ConfigurationError: the evaluation's simulator has another robot than the dataset.
        """
        from armature.components.robots.datasets.source import open_sources
        from armature.components.robots.evaluation.robot import refuse_other_robot

        if self.dataset is not None and self.evaluation is not None and self.simulator is not None:
            refuse_other_robot(open_sources(data.path), self.policy.image_keys, self.simulator)


class TrainVlaRl(Sections):
    """A policy that learns by trying in LIBERO, evaluated before and after on the same episodes.

    With `training` it is first trained on demonstrations that a scripted policy gives in the same simulator.
    """

    FLOW = "armature.flows.train_vla_rl.train_vla_rl"
    JOINED = (TrainVLASettings, TrainVLARLSettings, EvaluateLiberoStageSettings)
    FIRST_STAGES = ("policy",)
    MEMORY = f"{PLANNING}:recipe_memory"
    PLAN = f"{PLANNING}:plan_robots"

    policy: RobotPolicySettings
    """Where the weights come from, and what the policy is told of the robot."""
    simulator: SimulatorSection
    rollouts: RobotRolloutSettings
    """How much is played per step, and how actions are sampled."""
    trainer: RobotRLTrainerSettings
    """Objective, optimizer and number of steps."""
    preflight: RobotPreflightSettings
    """What sampler and trainer must agree on before the first step."""
    evaluation: TrainLiberoEvaluationSettings
    """Which tasks are played, how often, and by which seeds: by the policies before and after, and during training."""
    comparison: CompareLiberoSettings
    """How the policies before and after are compared."""
    machine: MachineSection = Machine()
    demonstrations: DemonstrationSettings | None = None
    """What the scripted policy demonstrates first."""
    layout: LayoutSettings | None = None
    """How the demonstrations are stored."""
    statistics: QuantileStatsSettings | None = None
    """Which features of them are measured."""
    training: VLATrainerSettings | None = None
    """The training on demonstrations."""

    @model_validator(mode="after")
    def _fit_together(self) -> Self:
        first = {name: getattr(self, name) for name in ("demonstrations", "layout", "statistics", "training")}
        if len({section is None for section in first.values()}) > 1:
            missing = ", ".join(name for name, section in first.items() if section is None)
            raise PydanticCustomError(
                "sections_incomplete",
                f"training on demonstrations needs {', '.join(first)}: add {missing}, or leave all out",
            )
        return self

    @model_validator(mode="after")
    def _quantized_products_are_there(self) -> Self:
        for name in ("rollouts", "evaluation"):
            _refuse_quantization(name, getattr(self, name), "policy", self.policy)
        split = TrainerProcesses.of(self.machine).sharding is not None
        if self.rollouts.quantization is not None and self.trainer.mode == "expert" and split:
            raise ValueError(
                "rollouts.quantization: the trainer's GPUs share one policy, and no layer of it computes in 8 bits "
                "then: train on one GPU, or leave rollouts.quantization out"
            )
        return self

    @model_validator(mode="after")
    def _imitation_makes_what_acts(self) -> Self:
        """Where the policy comes from somewhere else, its own settings say what it can do."""
        trained = self.policy.action_mode
        drawn = self.rollouts.inference_action_mode == "continuous" and self.rollouts.likelihood == "flow_sde"
        if self.policy.num_inference_steps == 1 and drawn:
            raise ValueError(
                "policy.num_inference_steps is 1, and Flow-SDE, which draws one denoising step at random, needs two at "
                "least: set it to 4 or more"
            )
        if self.training is None:
            return self
        chunk, carried = self.policy.chunk_size, self.policy.n_action_steps
        if isinstance(self.trainer.objective, RewardWeighted) and carried != chunk:
            raise ValueError(
                f"policy.n_action_steps is {carried} and policy.chunk_size {chunk}, and trainer.objective "
                "reward_weighted learns whole answers: set them alike"
            )
        for name in ("rollouts", "evaluation") if trained != "both" else ():
            if (asked := getattr(self, name).inference_action_mode) != trained:
                raise ValueError(
                    f"{name}.inference_action_mode is {asked}, and policy.action_mode {trained} trains other actions: "
                    "set them alike, or policy.action_mode to both"
                )
        return self

    @model_validator(mode="after")
    def _evaluation_is_held_out(self) -> Self:
        """Of initial states that are named for it, and of all where it decides what is kept."""
        played, tried = self.evaluation, self.rollouts
        same_tasks = not (played.tasks and tried.tasks) or set(played.tasks) & set(tried.tasks)
        if tried.suite not in played.suites or not same_tasks or not (played.every or played.initial_states):
            return self
        both = sorted(set(played.initial_states) & set(tried.initial_states))
        if not (played.initial_states and tried.initial_states):
            raise ValueError(
                "evaluation.initial_states, rollouts.initial_states: an empty one means all, and an evaluation that is "
                "held out begins in states that training never tries: name some in each"
            )
        if both:
            raise ValueError(
                f"evaluation.initial_states: training tries {', '.join(map(str, both))} as well: leave them out here "
                "or in rollouts.initial_states"
            )
        return self

    def refuse_sources(self) -> None:
        _refuse_unnamed(self.policy)

    def refuse_ahead(self) -> None:
        from armature.components.robots.evaluation.schedule import refuse_episodes
        from armature.components.robots.rl.schedule import refuse_groups

        refuse_groups(self.rollouts, self.simulator)
        refuse_episodes(self.evaluation, self.simulator)


class EvaluateLibero(Sections):
    """Play every task of some suites in the simulator, and say how many were solved."""

    FLOW = "armature.flows.evaluate_libero.evaluate_libero"
    JOINED = (EvaluateLiberoStageSettings,)
    MEMORY = f"{PLANNING}:recipe_memory"

    policy: RobotPolicySettings
    """The policy."""
    simulator: SimulatorSection
    evaluation: LiberoEvaluationSection
    comparison: CompareLiberoSettings
    """How the two are compared, where there is another."""
    machine: MachineSection = Machine()
    against: RobotPolicySettings | None = None
    """Another policy, which plays the same episodes; leave it out for none."""

    @model_validator(mode="after")
    def _quantized_products_are_there(self) -> Self:
        for name in ("policy", "against"):
            _refuse_quantization("evaluation", self.evaluation, name, getattr(self, name))
        return self

    def refuse_ahead(self) -> None:
        from armature.components.robots.evaluation.schedule import refuse_episodes

        refuse_episodes(self.evaluation, self.simulator)


def _refuse_unnamed(policy: RobotPolicySettings) -> None:
    from armature.components.machine.project import project_source
    from armature.components.models.source import check_source_name
    from armature.components.robots.policies.source import POLICY

    if source := policy.path or policy.checkpoint_path:
        check_source_name(project_source(source), policy.revision, POLICY)


def _refuse_quantization(
    section: str,
    played: LiberoEvaluationSettings | RobotRolloutSettings | None,
    name: str,
    policy: RobotPolicySettings | None,
) -> None:
    if played is not None and played.quantization is not None and policy is not None and policy.dtype != "bfloat16":
        raise ValueError(
            f"{section}.quantization: 8-bit products take the place of those in bfloat16, and {name}.dtype is "
            f"{policy.dtype}: set it to bfloat16, or leave {section}.quantization out"
        )
