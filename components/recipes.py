"""Recipes: for each flow a class whose fields are the sections of its TOML files, and the flow's parameters.

A section that may be None can be left out, which means: without it. Every other one is made of defaults where a recipe
leaves it out, if it has them all.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Self

from pydantic import BaseModel, Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from armature.components.batches.settings import BatchSettings
from armature.components.contracts.machine import Machine
from armature.components.contracts.settings import Settings
from armature.components.datasets.lerobot.settings import LayoutSettings
from armature.components.datasets.settings import AugmentStatsSettings, DatasetSettings, QuantileStatsSettings
from armature.components.environments.alfworld.stage import GamesStageSettings
from armature.components.environments.libero.demonstrations.settings import DemonstrationSettings
from armature.components.environments.libero.settings import SimulatorSettings
from armature.components.environments.settings import EnvironmentSettings
from armature.components.evaluation.libero.settings import (
    CompareLiberoSettings,
    EvaluateLiberoStageSettings,
    LiberoEvaluationSettings,
    TrainLiberoEvaluationSettings,
)
from armature.components.evaluation.settings import EvaluationSettings, TrainEvaluationSettings
from armature.components.evaluation.subjects import SubjectSettings, SweepSettings
from armature.components.inference.settings import ServerSettings
from armature.components.models.settings import ModelSettings
from armature.components.policies.settings import RobotPolicySettings
from armature.components.rl.settings import PreflightSettings, TrainVLMSettings
from armature.components.rollouts.settings import RolloutSettings
from armature.components.sft.settings import WarmStartSettings
from armature.components.training.processes import TrainerProcesses
from armature.components.vla.settings import TrainVLASettings, VLATrainerSettings
from armature.components.vla_rl.settings import (
    RewardWeighted,
    RobotPreflightSettings,
    RobotRLTrainerSettings,
    RobotRolloutSettings,
    TrainVLARLSettings,
)
from armature.components.vlm.settings import TrainerSettings

MachineSection = Annotated[Machine, Field(description="Facts of this machine; none changes the result.")]
ModelSection = Annotated[ModelSettings, Field(description="Where the weights come from and what of them is trained.")]
EnvironmentSection = Annotated[EnvironmentSettings, Field(description="What is played.")]
ServerSection = Annotated[ServerSettings, Field(description="What the servers are told.")]
EvaluationSection = Annotated[
    EvaluationSettings, Field(description="Which tasks are played, how often, and what counts as solved.")
]
SimulatorSection = Annotated[SimulatorSettings, Field(description="How LIBERO is simulated and drawn.")]
LiberoEvaluationSection = Annotated[
    LiberoEvaluationSettings, Field(description="Which tasks are played, how often, and by which seeds.")
]
StatisticsSection = Annotated[
    QuantileStatsSettings, Field(description="Which features are measured, and which frames of images.")
]


class Sections(Settings):
    """The sections of a recipe, `machine` among them."""

    JOINED: ClassVar[tuple[type[Settings], ...]] = ()
    """Settings of stages that join sections, and refuse some that are valid by themselves."""

    @model_validator(mode="after")
    def _stages_take_them_together(self) -> Self:
        """Before the first stage is run, not when the last one begins."""
        given = self.given()
        for stage in self.JOINED:
            if stage.model_fields.keys() <= given.keys():
                try:
                    stage.model_validate({name: given[name] for name in stage.model_fields})
                except ValidationError as error:
                    said = [problem["msg"].removeprefix("Value error, ") for problem in error.errors()]
                    raise PydanticCustomError(error.errors()[0]["type"], "\n".join(said)) from error
        return self

    @classmethod
    def optional(cls) -> frozenset[str]:
        """Those that a recipe may leave out, which means: without it."""
        return frozenset(name for name, field in cls.model_fields.items() if field.default is None)

    def given(self) -> dict[str, BaseModel]:
        """Those that are there, by name."""
        return {name: section for name in type(self).model_fields if (section := getattr(self, name)) is not None}


class AlfworldGames(Sections):
    """Games in ALFWorld's own folder layout, for environments whose games have the source folder."""

    games: GamesStageSettings = Field(description="Which games, and how many of each split.")
    machine: MachineSection = Machine()


class QuantileStats(Sections):
    """Minimum, maximum, mean, std and quantiles of every feature, of each episode and of all."""

    dataset: DatasetSettings = Field(description="The dataset, or several. What is there now is what is measured.")
    statistics: StatisticsSection
    augment: AugmentStatsSettings = Field(description="Whether the dataset gets the statistics.")
    machine: MachineSection = Machine()


class Demonstrations(Sections):
    """A LeRobot dataset of the episodes in which the scripted policy reached its goal, in LIBERO."""

    simulator: SimulatorSection
    demonstrations: DemonstrationSettings = Field(description="Which tasks are demonstrated, and how often.")
    layout: LayoutSettings = Field(description="How the dataset is stored.")
    machine: MachineSection = Machine()


class TrainVlm(Sections):
    """Tasks and a model, GRPO on rollouts from a pool of vLLM servers, and an evaluation of the result.

    With a warm start the model is first trained on demonstrations.
    """

    JOINED = (TrainVLMSettings,)

    model: ModelSection
    environment: EnvironmentSection
    inference: ServerSection
    rollouts: RolloutSettings = Field(description="How much is played per step, and how tokens are sampled.")
    batches: BatchSettings = Field(description="From rollouts to training samples.")
    trainer: TrainerSettings = Field(description="Objective, optimizer and number of steps.")
    preflight: PreflightSettings = Field(description="What trainer and server must agree on before the first step.")
    evaluation: TrainEvaluationSettings = Field(
        description="Which tasks are played, how often, and what counts as solved: by the trained model, and during "
        "training."
    )
    machine: MachineSection = Machine()
    warm_start: WarmStartSettings | None = Field(
        None, description="Training on demonstrations before that on rewards; leave it out for none."
    )


class TrainVla(Sections):
    """A dataset, its statistics and a policy, training, and an evaluation of the result in the simulator.

    The data are a dataset, or demonstrations that a scripted policy gives in the simulator: one of the two. A robot
    that is not LIBERO's has no evaluation: the error of held-out actions is the measure then.
    """

    JOINED = (TrainVLASettings, EvaluateLiberoStageSettings)

    policy: RobotPolicySettings = Field(
        description="Where the weights come from, and what the policy is told of the robot."
    )
    statistics: StatisticsSection
    training: VLATrainerSettings = Field(description="What of the policy is trained, and how.")
    machine: MachineSection = Machine()
    simulator: SimulatorSettings | None = Field(
        None, description="How LIBERO is simulated and drawn, for demonstrations and the evaluation."
    )
    evaluation: LiberoEvaluationSettings | None = Field(
        None, description="Which tasks the result plays, how often, and by which seeds; leave it out for none."
    )
    dataset: DatasetSettings | None = Field(None, description="The dataset, or several to be mixed.")
    demonstrations: DemonstrationSettings | None = Field(
        None, description="What the scripted policy demonstrates, in place of a dataset."
    )
    layout: LayoutSettings | None = Field(None, description="How the demonstrations are stored; goes with them.")
    comparison: CompareLiberoSettings | None = Field(
        None,
        description="Evaluates the policy before training as well, and compares; it has to know the robot then.",
    )

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


class TrainVlaRl(Sections):
    """A policy that learns by trying in LIBERO, evaluated before and after on the same episodes.

    With `training` it is first trained on demonstrations that a scripted policy gives in the same simulator.
    """

    JOINED = (TrainVLASettings, TrainVLARLSettings, EvaluateLiberoStageSettings)

    policy: RobotPolicySettings = Field(
        description="Where the weights come from, and what the policy is told of the robot."
    )
    simulator: SimulatorSection
    rollouts: RobotRolloutSettings = Field(description="How much is played per step, and how actions are sampled.")
    trainer: RobotRLTrainerSettings = Field(description="Objective, optimizer and number of steps.")
    preflight: RobotPreflightSettings = Field(
        description="What sampler and trainer must agree on before the first step."
    )
    evaluation: TrainLiberoEvaluationSettings = Field(
        description="Which tasks are played, how often, and by which seeds: by the policies before and after, and "
        "during training."
    )
    comparison: CompareLiberoSettings = Field(description="How the policies before and after are compared.")
    machine: MachineSection = Machine()
    demonstrations: DemonstrationSettings | None = Field(
        None, description="What the scripted policy demonstrates first."
    )
    layout: LayoutSettings | None = Field(None, description="How the demonstrations are stored.")
    statistics: QuantileStatsSettings | None = Field(None, description="Which features of them are measured.")
    training: VLATrainerSettings | None = Field(None, description="The training on demonstrations.")

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


class Evaluate(Sections):
    """Play every task of a split with one checkpoint, and say how many were solved."""

    subject: SubjectSettings = Field(description="The checkpoint.")
    model: ModelSection
    environment: EnvironmentSection
    inference: ServerSection
    evaluation: EvaluationSection
    machine: MachineSection = Machine()


class Sweep(Sections):
    """Evaluate checkpoints times seeds; a cell that fails takes no other with it."""

    sweep: SweepSettings = Field(description="The checkpoints and the seeds.")
    model: ModelSection
    environment: EnvironmentSection
    inference: ServerSection
    evaluation: EvaluationSection
    machine: MachineSection = Machine()


class EvaluateLibero(Sections):
    """Play every task of some suites in the simulator, and say how many were solved."""

    policy: RobotPolicySettings = Field(description="The policy.")
    simulator: SimulatorSection
    evaluation: LiberoEvaluationSection
    comparison: CompareLiberoSettings = Field(description="How the two are compared, where there is another.")
    machine: MachineSection = Machine()
    against: RobotPolicySettings | None = Field(
        None, description="Another policy, which plays the same episodes; leave it out for none."
    )

    @model_validator(mode="after")
    def _quantized_products_are_there(self) -> Self:
        for name in ("policy", "against"):
            _refuse_quantization("evaluation", self.evaluation, name, getattr(self, name))
        return self


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


RECIPES: dict[str, type[Sections]] = {
    "alfworld-games": AlfworldGames,
    "quantile-stats": QuantileStats,
    "train-vlm": TrainVlm,
    "evaluate": Evaluate,
    "evaluate/sweep": Sweep,
    "demonstrations": Demonstrations,
    "train-vla": TrainVla,
    "train-vla-rl": TrainVlaRl,
    "evaluate/libero": EvaluateLibero,
    "evaluate/libero-perturbed": EvaluateLibero,
}
"""By a recipe's whole name, else by that of its flow."""
