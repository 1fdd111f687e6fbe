"""Recipes: for each flow a class whose fields are the sections of its TOML files, and the flow's parameters.

A section that may be None can be left out, which means: without it. Every other one is made of defaults where a recipe
leaves it out, if it has them all.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, Field

from components.batches.settings import BatchSettings
from components.contracts.machine import Machine
from components.contracts.settings import Settings
from components.datasets.lerobot.settings import LayoutSettings
from components.datasets.settings import AugmentStatsSettings, DatasetSettings, QuantileStatsSettings
from components.environments.alfworld.stage import GamesStageSettings
from components.environments.libero.demonstrations.settings import DemonstrationSettings
from components.environments.libero.settings import SimulatorSettings
from components.environments.settings import EnvironmentSettings
from components.evaluation.libero.settings import CompareLiberoSettings, LiberoEvaluationSettings
from components.evaluation.settings import EvaluationSettings
from components.evaluation.subjects import SubjectSettings, SweepSettings
from components.inference.settings import ServerSettings
from components.models.settings import ModelSettings
from components.policies.settings import RobotPolicySettings
from components.rl.settings import PreflightSettings
from components.rollouts.settings import RolloutSettings
from components.sft.settings import WarmStartSettings
from components.training.settings import TrainerSettings
from components.vla.settings import VLATrainerSettings

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
    """A LeRobot dataset of the episodes in which the expert reached its goal, in LIBERO."""

    simulator: SimulatorSection
    demonstrations: DemonstrationSettings = Field(description="Which tasks are demonstrated, and how often.")
    layout: LayoutSettings = Field(description="How the dataset is stored.")
    machine: MachineSection = Machine()


class TrainVlm(Sections):
    """Tasks and a model, GRPO on rollouts from a pool of vLLM servers, and an evaluation of the result.

    With a warm start the model is first trained on demonstrations.
    """

    model: ModelSection
    environment: EnvironmentSection
    inference: ServerSection
    rollouts: RolloutSettings = Field(description="How much is played per step, and how tokens are sampled.")
    batches: BatchSettings = Field(description="From rollouts to training samples.")
    trainer: TrainerSettings = Field(description="Objective, optimizer and number of steps.")
    preflight: PreflightSettings = Field(description="What trainer and server must agree on before the first step.")
    evaluation: EvaluationSection
    machine: MachineSection = Machine()
    warm_start: WarmStartSettings | None = Field(
        None, description="Training on demonstrations before that on rewards; leave it out for none."
    )


class TrainVla(Sections):
    """A dataset, its statistics and a policy, training, and an evaluation of the result in the simulator.

    The data are a dataset, or demonstrations that a scripted policy gives in the simulator: one of the two.
    """

    policy: RobotPolicySettings = Field(
        description="Where the weights come from, and what the policy is told of the robot."
    )
    statistics: StatisticsSection
    training: VLATrainerSettings = Field(description="What of the policy is trained, and how.")
    simulator: SimulatorSection
    evaluation: LiberoEvaluationSection
    machine: MachineSection = Machine()
    dataset: DatasetSettings | None = Field(None, description="The dataset, or several to be mixed.")
    demonstrations: DemonstrationSettings | None = Field(
        None, description="What the expert demonstrates, in place of a dataset."
    )
    layout: LayoutSettings | None = Field(None, description="How the demonstrations are stored; goes with them.")
    comparison: CompareLiberoSettings | None = Field(
        None,
        description="Evaluates the policy before training as well, and compares; it has to know the robot then.",
    )


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


RECIPES: dict[str, type[Sections]] = {
    "alfworld-games": AlfworldGames,
    "quantile-stats": QuantileStats,
    "train-vlm": TrainVlm,
    "evaluate": Evaluate,
    "evaluate/sweep": Sweep,
    "demonstrations": Demonstrations,
    "train-vla": TrainVla,
    "evaluate/libero": EvaluateLibero,
}
"""By a recipe's whole name, else by that of its flow."""
