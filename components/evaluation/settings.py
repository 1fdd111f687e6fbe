"""Which tasks are played, how often, and what counts as solved; in an evaluation, and between a training's steps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Self

from pydantic import ConfigDict, Field, NonNegativeInt, PositiveInt, field_validator, model_validator

from armature.components.configuration.recipes import MachineSection, Sections, SettingsT
from armature.components.contracts.episodes import Split
from armature.components.contracts.machine import Machine
from armature.components.contracts.settings import Settings
from armature.components.environments.settings import EnvironmentSettings
from armature.components.inference.settings import EvaluationSamplingSettings, ServerSettings
from armature.components.models.settings import ModelSettings


class PlaySettings(Settings):
    """How a task is played, and what counts as solved."""

    samples_per_task: PositiveInt = 1
    """Episodes per task; more than one needs a temperature above 0."""
    success_reward: float = 1.0
    """An episode counts as solved from this reward on."""
    sampling: EvaluationSamplingSettings
    """How tokens are chosen; temperature 0 is greedy."""
    seed: NonNegativeInt = 0
    """Seed of every request."""

    @model_validator(mode="after")
    def _samples_differ(self) -> Self:
        if self.samples_per_task > 1 and self.sampling.temperature == 0:
            raise ValueError(
                f"samples_per_task = {self.samples_per_task} at temperature 0 would play the same episode again: "
                "set samples_per_task = 1 or a temperature above 0"
            )
        return self


class EvaluationSettings(PlaySettings):
    """Every task of the splits is played `samples_per_task` times."""

    model_config = ConfigDict(title="Evaluation")

    splits: tuple[Split, ...] = Field(("heldout",), min_length=1)
    """Which tasks: heldout were never trained on. The first split's numbers are the headline."""
    max_tasks: NonNegativeInt = 0
    """Play only the first tasks of each split; 0 plays all."""
    kind_field: str = ""
    """Field of the tasks' payload to break accuracy down by; empty for none."""

    @field_validator("splits")
    @classmethod
    def _each_once(cls, splits: tuple[Split, ...]) -> tuple[Split, ...]:
        if len(set(splits)) < len(splits):
            raise ValueError(f"{', '.join(splits)}: name each split once")
        return splits


class EvaluationSchedule(Settings):
    """When a training is evaluated, and when evaluations end it."""

    every: NonNegativeInt = 0
    """Steps between evaluations during training; the first is before step 1, the last after the last step. Training is
    the same with and without them. 0: none."""
    patience: NonNegativeInt = 0
    """Training ends after so many evaluations in a row that were not better than the best; 0: never."""

    @model_validator(mode="after")
    def _patience_needs_evaluations(self) -> Self:
        if self.patience and not self.every:
            raise ValueError(
                f"patience = {self.patience} counts evaluations during training, and there are none: "
                "set every, or leave patience out"
            )
        return self


class HeldoutSetSettings(EvaluationSchedule, PlaySettings):
    """A fixed set of held-out tasks that the policy plays between the steps of its training."""

    heldout_tasks: PositiveInt = 64
    """Number of held-out tasks played in each evaluation during training; always the first ones of the split."""


class TrainEvaluationSettings(HeldoutSetSettings, EvaluationSettings):
    """An evaluation of the trained model, and with `every` one of each so many steps while it trains.

    Both play by the same sampling and seed, so that a task is asked the same of every checkpoint.
    """

    @property
    def heldout_set(self) -> HeldoutSetSettings | None:
        """The settings of evaluations during training, on which the training depends; None without such evaluations."""
        if not self.every:
            return None
        return HeldoutSetSettings.model_validate(
            {name: getattr(self, name) for name in HeldoutSetSettings.model_fields}
        )


class EvaluateStageSettings(Settings):
    """The sections that an evaluation's result depends on."""

    evaluation: EvaluationSettings
    inference: ServerSettings


# Recipes that evaluate one checkpoint, or each of several checkpoints with each of several seeds.

ModelSection = Annotated[ModelSettings, Field(description="Where the weights come from and what of them is trained.")]
EnvironmentSection = Annotated[EnvironmentSettings, Field(description="What is played.")]
ServerSection = Annotated[ServerSettings, Field(description="What the servers are told.")]
EvaluationSection = Annotated[
    EvaluationSettings, Field(description="Which tasks are played, how often, and what counts as solved.")
]

CHECKPOINT = (
    "An artifact's folder or digest, models:/NAME@ALIAS of MLflow, a hub name, or tiny/FAMILY; the last two "
    "are loaded as the section model says."
)


class SubjectSettings(Settings):
    """The checkpoint that is evaluated."""

    model_config = ConfigDict(title="Subject")

    checkpoint: str = Field(min_length=1, description=CHECKPOINT)


class SweepSettings(Settings):
    """Every checkpoint is evaluated with every seed."""

    model_config = ConfigDict(title="Sweep")

    checkpoints: list[str] = Field(min_length=1, description=f"Each: {CHECKPOINT[0].lower()}{CHECKPOINT[1:]}")
    seeds: list[NonNegativeInt] = Field(min_length=1)
    """Seeds of the requests, one evaluation each."""


class ModelSections(Sections):
    """Sections of a recipe in which a model plays an environment."""

    if TYPE_CHECKING:  # each recipe places these fields among its sections
        model: ModelSettings
        environment: EnvironmentSettings

    def settings_for(self, settings: type[SettingsT]) -> SettingsT:
        """As for other recipes; tasks that show foreign texts also get the model's special tokens, which no text may
        have.

        Raises:
            ConfigurationError, DataError: see `reserved_tokens`.
        """
        found = super().settings_for(settings)
        args: dict[str, Any] = found.args if isinstance(found, EnvironmentSettings) else {}
        if "reserved_tokens" not in args:
            return found
        from armature.components.models.reserved_tokens import reserved_tokens  # the hub's client takes long to import

        tokens = reserved_tokens(self.model, images_only=args.get("allow_special_tokens", False))
        listed = sorted({*args["reserved_tokens"], *tokens})
        return found.model_copy(update={"args": args | {"reserved_tokens": listed}})


class Evaluate(ModelSections):
    """Play every task of a split with one checkpoint, and say how many were solved."""

    FLOW = "armature.flows.evaluate.evaluate"

    subject: SubjectSettings
    """The checkpoint."""
    model: ModelSection
    environment: EnvironmentSection
    inference: ServerSection
    evaluation: EvaluationSection
    machine: MachineSection = Machine()


class Sweep(ModelSections):
    """Evaluate checkpoints times seeds; a cell that fails takes no other with it."""

    FLOW = "armature.flows.sweep.sweep"

    sweep: SweepSettings
    """The checkpoints and the seeds."""
    model: ModelSection
    environment: EnvironmentSection
    inference: ServerSection
    evaluation: EvaluationSection
    machine: MachineSection = Machine()
