"""Recipes for robots: statistics, demonstrations, training on demonstrations and on rewards, evaluation in LIBERO."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Annotated, Self

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from armature.components.configuration.recipes import MachineSection, Sections
from armature.components.contracts.errors import ConfigurationError
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
    PlayingSettings,
    PolicyEvaluationSettings,
    TrainLiberoEvaluationSettings,
)
from armature.components.robots.evaluation.sweep import PolicySweepSettings
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
from armature.components.robots.served.settings import (
    BenchmarkEvaluationSettings,
    EvaluateBenchmarkStageSettings,
    ServedBenchmarkSettings,
)
from armature.components.training.processes import TrainerProcesses

if TYPE_CHECKING:
    from armature.components.robots.evaluation.robot import SimulatedRobot

PLANNING = "armature.components.robots.planning"

SimulatorSection = Annotated[SimulatorSettings, Field(description="Simulation and rendering of LIBERO.")]
LiberoEvaluationSection = Annotated[
    LiberoEvaluationSettings, Field(description="Tasks and number of episodes of the evaluation, and their seeds.")
]
StatisticsSection = Annotated[
    QuantileStatsSettings, Field(description="Features to measure, and the frames whose images are counted.")
]


class QuantileStats(Sections):
    """Compute minimum, maximum, mean, standard deviation and quantiles of every feature, per episode and over all."""

    FLOW = "armature.flows.quantile_stats.quantile_stats"

    dataset: DatasetSettings
    """The dataset, or several. Their current content is measured."""
    statistics: StatisticsSection
    augment: AugmentStatsSettings
    """Option to put the statistics into the dataset."""
    machine: MachineSection = Machine()

    def refuse_sources(self) -> None:
        """Check that folders of the datasets exist."""
        _refuse_missing(self.dataset)


class Demonstrations(Sections):
    """Record a LeRobot dataset of episodes in which the scripted policy reached its goal in LIBERO."""

    FLOW = "armature.flows.demonstrations.demonstrations"

    simulator: SimulatorSection
    demonstrations: DemonstrationSettings
    """Tasks to demonstrate and number of episodes."""
    layout: LayoutSettings
    """Files and video encoding of the dataset."""
    machine: MachineSection = Machine()


class TrainVla(Sections):
    """Train a policy on a dataset or on demonstrations, and evaluate it in the simulator.

    The data are either a dataset or demonstrations that a scripted policy gives in the simulator. A policy for another
    robot than LIBERO's cannot be evaluated there: then the error of held-out actions measures it.
    """

    FLOW = "armature.flows.train_vla.train_vla"
    JOINED = (TrainVLASettings, EvaluateLiberoStageSettings)
    FIRST_STAGES = ("policy",)
    MEMORY = f"{PLANNING}:recipe_memory"

    policy: RobotPolicySettings
    """Source of the weights, and the description of the robot that the policy gets."""
    statistics: StatisticsSection
    training: VLATrainerSettings
    """Weights to train, optimizer and schedule."""
    machine: MachineSection = Machine()
    simulator: SimulatorSettings | None = None
    """Simulation and rendering of LIBERO, for demonstrations and the evaluation."""
    evaluation: LiberoEvaluationSettings | None = None
    """Tasks and number of episodes of the evaluation of the trained policy, and their seeds; none: no evaluation."""
    dataset: DatasetSettings | None = None
    """The dataset, or several to mix."""
    demonstrations: DemonstrationSettings | None = None
    """Tasks that the scripted policy demonstrates, instead of a dataset."""
    layout: LayoutSettings | None = None
    """Files and video encoding of the demonstrations; required with them."""
    comparison: CompareLiberoSettings | None = None
    """Also evaluates the policy before training and compares. That policy must already know the robot."""

    @model_validator(mode="after")
    def _check_sections(self) -> Self:
        if (self.dataset is None) == (self.demonstrations is None):
            count = "neither" if self.dataset is None else "both"
            raise PydanticCustomError(
                "one_kind_of_data",
                f"a policy is trained on either a dataset or demonstrations, but {count} of these sections are there: "
                "keep one of them",
            )
        if (self.demonstrations is None) != (self.layout is None):
            raise PydanticCustomError(
                "sections_incomplete", "the sections demonstrations and layout belong together: use both, or neither"
            )
        if (self.simulator is None) != (self.evaluation is None and self.demonstrations is None):
            raise PydanticCustomError(
                "sections_incomplete",
                "the section simulator is for demonstrations and evaluation: "
                + ("add it" if self.simulator is None else "leave it out, or add one of them"),
            )
        if self.comparison is not None and self.evaluation is None:
            raise PydanticCustomError(
                "sections_incomplete",
                "comparison needs two evaluations: add the section evaluation, or leave comparison out",
            )
        _refuse_played("evaluation", self.evaluation, "policy", self.policy)
        if self.evaluation is None and self.training.heldout is None:
            raise PydanticCustomError(
                "nothing_measured",
                "nothing would measure the trained policy: add training.heldout = { fraction = 0.1 }, or, for LIBERO's "
                "robot, the section evaluation",
            )
        return self

    def refuse_sources(self) -> None:
        """Check the name of the policy's source, and that folders of the datasets exist."""
        _refuse_unnamed(self.policy)
        _refuse_missing(self.dataset)

    def refuse_ahead(self) -> None:
        """Check the split of the policy over GPUs and the episodes of the evaluation, before anything is computed."""
        from armature.components.robots.evaluation.schedule import refuse_episodes

        _refuse_split(self.policy, self.machine)
        if self.evaluation is not None and self.simulator is not None:
            refuse_episodes(self.evaluation, self.simulator)

    def check_stages(self, inputs: Mapping[str, Artifact], say: Callable[[str], None]) -> None:
        """Check that the dataset has what the recipe uses of it, and that its robot is the simulator's."""
        from armature.components.configuration.stages import run_stage

        if self.dataset is None:
            return
        data = run_stage("dataset", self.dataset, {}, self.machine)
        if self.evaluation is not None:
            self.refuse_other_robot(data)
            say("dataset: its robot is the simulator's robot")

    def refuse_other_robot(self, data: Artifact) -> None:
        """Check that the dataset's robot is the robot of the evaluation's simulator.

        Raises:
            ConfigurationError: the robots differ.
        """
        from armature.components.robots.datasets.source import open_sources
        from armature.components.robots.evaluation.robot import refuse_other_robot

        if self.dataset is not None and self.evaluation is not None and self.simulator is not None:
            refuse_other_robot(open_sources(data.path), self.policy.image_keys, self.simulator)


class TrainVlaRl(Sections):
    """Train a policy by reinforcement learning in LIBERO, and evaluate it before and after on the same episodes.

    With the section `training` it is first trained on demonstrations by a scripted policy in the same simulator.
    """

    FLOW = "armature.flows.train_vla_rl.train_vla_rl"
    JOINED = (TrainVLASettings, TrainVLARLSettings, EvaluateLiberoStageSettings)
    FIRST_STAGES = ("policy",)
    MEMORY = f"{PLANNING}:recipe_memory"
    PLAN = f"{PLANNING}:plan_robots"

    policy: RobotPolicySettings
    """Source of the weights, and the description of the robot that the policy gets."""
    simulator: SimulatorSection
    rollouts: RobotRolloutSettings
    """Episodes per step, and the sampling of actions."""
    trainer: RobotRLTrainerSettings
    """Objective, optimizer and number of steps."""
    preflight: RobotPreflightSettings
    """Check, before the first step, that sampler and trainer compute the same probabilities."""
    evaluation: TrainLiberoEvaluationSettings
    """Tasks and number of episodes of the evaluations before, during and after training, and their seeds."""
    comparison: CompareLiberoSettings
    """Comparison of the policies before and after."""
    machine: MachineSection = Machine()
    demonstrations: DemonstrationSettings | None = None
    """Tasks that the scripted policy demonstrates first."""
    layout: LayoutSettings | None = None
    """Files and video encoding of the demonstrations."""
    statistics: QuantileStatsSettings | None = None
    """Features of the demonstrations to measure."""
    training: VLATrainerSettings | None = None
    """Training on the demonstrations."""

    @model_validator(mode="after")
    def _check_training_sections(self) -> Self:
        first = {name: getattr(self, name) for name in ("demonstrations", "layout", "statistics", "training")}
        if len({section is None for section in first.values()}) > 1:
            missing = ", ".join(name for name, section in first.items() if section is None)
            raise PydanticCustomError(
                "sections_incomplete",
                f"training on demonstrations needs {', '.join(first)}: add {missing}, or leave all of them out",
            )
        return self

    @model_validator(mode="after")
    def _check_quantization(self) -> Self:
        for name in ("rollouts", "evaluation"):
            _refuse_played(name, getattr(self, name), "policy", self.policy)
        split = TrainerProcesses.of(self.machine).sharding is not None
        if self.rollouts.quantization is not None and self.trainer.mode == "expert" and split:
            raise ValueError(
                "rollouts.quantization: the trainer shards the policy over its GPUs, which does not support 8-bit "
                "layers: train on one GPU, or leave rollouts.quantization out"
            )
        return self

    @model_validator(mode="after")
    def _check_policy(self) -> Self:
        """Check that the policy supports the rollouts' sampling and is trained for the actions that are played.

        Without the section `training` the policy comes from elsewhere, and its own settings define what it can do.
        """
        self.policy.refuse_unsupported(trainer=self.trainer)
        trained = self.policy.action_mode
        drawn = self.rollouts.inference_action_mode == "continuous" and self.rollouts.likelihood == "flow_sde"
        if self.policy.num_inference_steps == 1 and drawn:
            raise ValueError(
                "policy.num_inference_steps is 1, but Flow-SDE samples one of at least two denoising steps at random: "
                "set it to 4 or more"
            )
        if self.training is None:
            return self
        chunk, carried = self.policy.chunk_size, self.policy.n_action_steps
        if isinstance(self.trainer.objective, RewardWeighted) and carried != chunk:
            raise ValueError(
                f"policy.n_action_steps is {carried} and policy.chunk_size is {chunk}, but trainer.objective "
                "reward_weighted learns whole chunks: set them to the same value"
            )
        for name in ("rollouts", "evaluation") if trained != "both" else ():
            if (asked := getattr(self, name).inference_action_mode) != trained:
                raise ValueError(
                    f"{name}.inference_action_mode is {asked}, but policy.action_mode {trained} trains other actions: "
                    "set both to the same value, or policy.action_mode to both"
                )
        return self

    @model_validator(mode="after")
    def _check_heldout_states(self) -> Self:
        """Check that an evaluation that has its own initial states, or chooses the best step, uses held-out states."""
        played, tried = self.evaluation, self.rollouts
        same_tasks = not (played.tasks and tried.tasks) or set(played.tasks) & set(tried.tasks)
        if tried.suite not in played.suites or not same_tasks or not (played.every or played.initial_states):
            return self
        both = sorted(set(played.initial_states) & set(tried.initial_states))
        if not (played.initial_states and tried.initial_states):
            raise ValueError(
                "evaluation.initial_states, rollouts.initial_states: an empty list means all states, but a held-out "
                "evaluation must use states that training does not use: list some in each"
            )
        if both:
            raise ValueError(
                f"evaluation.initial_states: training also uses {', '.join(map(str, both))}: leave them out here or in "
                "rollouts.initial_states"
            )
        return self

    def refuse_sources(self) -> None:
        """Check the name of the policy's source."""
        _refuse_unnamed(self.policy)

    def refuse_ahead(self) -> None:
        """Check the split of the policy over GPUs and all episodes, before anything is computed."""
        from armature.components.robots.evaluation.schedule import refuse_episodes
        from armature.components.robots.rl.schedule import refuse_groups

        _refuse_split(self.policy, self.machine)
        refuse_groups(self.rollouts, self.simulator)
        refuse_episodes(self.evaluation, self.simulator)


class Players(Sections):
    """Base of recipes in which policies play the same episodes. Each is checked before anything is computed."""

    if TYPE_CHECKING:  # each recipe places this field among its sections
        evaluation: PolicyEvaluationSettings

    def policies(self) -> dict[str, RobotPolicySettings]:
        """Return the settings of each policy, by the place in the recipe."""
        raise NotImplementedError

    def robot(self) -> SimulatedRobot:
        """Return the robot that the policies move."""
        raise NotImplementedError

    @model_validator(mode="after")
    def _check_quantization(self) -> Self:
        for place, policy in self.policies().items():
            _refuse_played("evaluation", self.evaluation, place, policy)
        return self

    def refuse_sources(self) -> None:
        """Check that each policy has one source, which may also be an alias of MLflow."""
        from armature.components.robots.policies.source import policy_source

        for policy in self.policies().values():
            policy_source(policy)

    def refuse_ahead(self) -> None:
        """Check that policies of other programs fit the robot, before anything is computed."""
        from armature.components.robots.evaluation.robot import refuse_external

        for place, policy in self.policies().items():
            if policy.external is not None:
                refuse_external(policy.external, self.robot(), self.evaluation, place)


class OneOrTwoPlayers(Players):
    """Base of recipes in which a policy plays, and possibly another one to compare it with."""

    if TYPE_CHECKING:
        policy: RobotPolicySettings
        against: RobotPolicySettings | None

    def policies(self) -> dict[str, RobotPolicySettings]:
        """Return the policy, and the other one if there is one."""
        return {"policy": self.policy} | ({"against": self.against} if self.against is not None else {})


class LiberoPlayers(Players):
    """Base of recipes in which policies play LIBERO's suites."""

    JOINED = (EvaluateLiberoStageSettings,)

    if TYPE_CHECKING:
        simulator: SimulatorSettings
        evaluation: LiberoEvaluationSettings

    def robot(self) -> SimulatedRobot:
        """Return LIBERO's robot."""
        from armature.components.robots.evaluation.robot import libero_robot

        return libero_robot(self.simulator)

    def refuse_ahead(self) -> None:
        """Check that the simulator can play the episodes and external policies fit it, before anything is computed."""
        from armature.components.robots.evaluation.schedule import refuse_episodes

        super().refuse_ahead()
        refuse_episodes(self.evaluation, self.simulator)


class EvaluateLibero(LiberoPlayers, OneOrTwoPlayers):
    """Play every task of some suites in the simulator and report the success rates."""

    FLOW = "armature.flows.evaluate_libero.evaluate_libero"
    MEMORY = f"{PLANNING}:recipe_memory"

    policy: RobotPolicySettings
    """The policy to evaluate."""
    simulator: SimulatorSection
    evaluation: LiberoEvaluationSection
    comparison: CompareLiberoSettings
    """Comparison with the other policy, if there is one."""
    machine: MachineSection = Machine()
    against: RobotPolicySettings | None = None
    """Another policy that plays the same episodes; none: no comparison."""


class SweepPolicies(LiberoPlayers):
    """Let several policies play the same episodes, and compare each pair. A failing policy does not stop the others."""

    FLOW = "armature.flows.sweep_policies.sweep_policies"
    MEMORY = f"{PLANNING}:sweep_memory"

    sweep: PolicySweepSettings
    """The policies."""
    simulator: SimulatorSection
    evaluation: LiberoEvaluationSection
    comparison: CompareLiberoSettings
    """Comparison of each pair."""
    machine: MachineSection = Machine()

    def policies(self) -> dict[str, RobotPolicySettings]:
        """Return the policies of the sweep."""
        return {f"sweep.policies.{name}": policy for name, policy in self.sweep.policies.items()}


class EvaluateBenchmark(OneOrTwoPlayers):
    """Play tasks of a benchmark of vla-eval and report the success rates."""

    FLOW = "armature.flows.evaluate_benchmark.evaluate_benchmark"
    MEMORY = f"{PLANNING}:recipe_memory"
    JOINED = (EvaluateBenchmarkStageSettings,)

    policy: RobotPolicySettings
    """The policy to evaluate."""
    benchmark: ServedBenchmarkSettings
    """The benchmark, and the environment in which it runs."""
    evaluation: BenchmarkEvaluationSettings
    """Tasks and number of episodes, and the sampling of actions."""
    comparison: CompareLiberoSettings
    """Comparison with the other policy, if there is one."""
    machine: MachineSection = Machine()
    against: RobotPolicySettings | None = None
    """Another policy that plays the same episodes; none: no comparison."""

    def robot(self) -> SimulatedRobot:
        """Return the benchmark's robot."""
        from armature.components.robots.served.runs import served_robot

        return served_robot(self.benchmark)

    def refuse_ahead(self) -> None:
        """Check that the benchmark's environment exists and external policies fit it, before anything is computed."""
        from armature.components.robots.served.runs import benchmark_folder, benchmark_python

        benchmark_python(self.benchmark)
        benchmark_folder(self.benchmark)
        super().refuse_ahead()


def _refuse_missing(dataset: DatasetSettings | None) -> None:
    from armature.components.machine.project import project_source
    from armature.components.robots.datasets.remote import refuse_missing_dataset

    for each in dataset.listed() if dataset is not None else ():
        refuse_missing_dataset(project_source(each.path), each.revision)


def _refuse_unnamed(policy: RobotPolicySettings) -> None:
    from armature.components.models.source import check_source_name
    from armature.components.robots.policies.source import POLICY, policy_source

    if policy.external is not None:
        raise ConfigurationError(
            "a policy of another program can be evaluated, not trained",
            code="policy_not_trainable",
            where="policy.server" if policy.server is not None else "policy.lerobot",
            remedy="evaluate it with evaluate/libero-openpi, or train a policy with policy.checkpoint_path or "
            "policy.path",
        )
    if source := policy_source(policy):
        check_source_name(source, policy.revision, POLICY)


def _refuse_split(policy: RobotPolicySettings, machine: Machine) -> None:
    processes = TrainerProcesses.of(machine)
    if processes.sharding is not None:  # loading a family takes seconds
        from armature.components.robots.policies.family import refuse_sharding

        refuse_sharding(policy.family, processes)


def _refuse_played(
    section: str,
    played: PlayingSettings | None,
    name: str,
    policy: RobotPolicySettings,
) -> None:
    policy.refuse_unsupported(**{section: played})
    if played is not None and played.quantization is not None and policy.dtype != "bfloat16":
        raise ValueError(
            f"{section}.quantization: 8-bit layers replace bfloat16 layers, but {name}.dtype is {policy.dtype}: set it "
            f"to bfloat16, or leave {section}.quantization out"
        )
