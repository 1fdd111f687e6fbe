"""Settings of evaluations: the tasks, the episodes per task and the reward from which an episode counts as solved."""

from __future__ import annotations

from collections.abc import Mapping
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
    """Settings for playing tasks: sampling, seed, and the reward from which an episode counts as solved."""

    samples_per_task: PositiveInt = 1
    """Episodes per task; more than one requires a temperature above 0."""
    success_reward: float = 1.0
    """Smallest reward with which an episode counts as solved."""
    sampling: EvaluationSamplingSettings
    """Sampling parameters of the model servers; temperature 0 is greedy decoding."""
    seed: NonNegativeInt = 0
    """Seed of every request."""

    @model_validator(mode="after")
    def _samples_differ(self) -> Self:
        if self.samples_per_task > 1 and self.sampling.temperature == 0:
            raise ValueError(
                f"samples_per_task = {self.samples_per_task} at temperature 0 would repeat the same episode: "
                "set samples_per_task = 1 or a temperature above 0"
            )
        return self


class EvaluationSettings(PlaySettings):
    """Settings of an evaluation that plays every task of some splits.

    Example:
        >>> plan = EvaluationSettings(sampling=EvaluationSamplingSettings(max_tokens=8, temperature=0.0))
        >>> plan.splits, plan.samples_per_task
        (('heldout',), 1)
    """

    model_config = ConfigDict(title="Evaluation")

    splits: tuple[Split, ...] = Field(("heldout",), min_length=1)
    """Splits to play. Tasks of `heldout` were never trained on. The numbers of the first split are the headline."""
    max_tasks: NonNegativeInt = 0
    """Play only this many tasks of each split, the first ones; 0 plays all."""
    kind_field: str = ""
    """Field of the tasks' payload by which accuracy is broken down; empty for no breakdown. Unset: "kind" for a table
    with environment.args.kind."""

    @field_validator("splits")
    @classmethod
    def _each_once(cls, splits: tuple[Split, ...]) -> tuple[Split, ...]:
        if len(set(splits)) < len(splits):
            raise ValueError(f"{', '.join(splits)}: name each split once")
        return splits


class EvaluationSchedule(Settings):
    """Schedule of evaluations during training, and the number of evaluations without improvement that ends it."""

    every: NonNegativeInt = 0
    """Training steps between two evaluations; 0 disables evaluation during training. The first one is before step 1,
    the last one after the last step. Training is the same with and without evaluations."""
    patience: NonNegativeInt = 0
    """End training after this many evaluations in a row without a new best; 0 never ends it early."""

    @model_validator(mode="after")
    def _patience_needs_evaluations(self) -> Self:
        if self.patience and not self.every:
            raise ValueError(
                f"patience = {self.patience} counts evaluations during training, and there are none: "
                "set every, or leave patience out"
            )
        return self


class HeldoutSetSettings(EvaluationSchedule, PlaySettings):
    """Settings of the held-out set: a fixed set of held-out tasks that the policy plays between training steps."""

    heldout_tasks: PositiveInt = 64
    """Number of held-out tasks played in each evaluation during training; always the first ones of the split."""


class TrainEvaluationSettings(HeldoutSetSettings, EvaluationSettings):
    """Settings of evaluations during training (if `every` is set) and of the final evaluation of the trained model.

    Both use the same sampling and seeds, so every checkpoint gets the same requests for a task.
    """

    @property
    def heldout_set(self) -> HeldoutSetSettings | None:
        """Settings of evaluations during training; None if `every` is 0. The training's fingerprint depends on them."""
        if not self.every:
            return None
        return HeldoutSetSettings.model_validate(
            {name: getattr(self, name) for name in HeldoutSetSettings.model_fields}
        )


class EvaluateStageSettings(Settings):
    """The sections of a recipe that an evaluation's result depends on."""

    evaluation: EvaluationSettings
    inference: ServerSettings


# --- Recipes ---

ModelSection = Annotated[ModelSettings, Field(description="Where the weights come from and which of them are trained.")]
EnvironmentSection = Annotated[EnvironmentSettings, Field(description="The environment that provides the tasks.")]
ServerSection = Annotated[ServerSettings, Field(description="Settings of the model servers.")]
EvaluationSection = Annotated[
    EvaluationSettings, Field(description="Which tasks are played, how often, and which reward counts as solved.")
]

CHECKPOINT = (
    "An artifact's folder or digest, models:/NAME@ALIAS of MLflow, a hub name, or tiny/FAMILY; the last two "
    "are loaded with the settings of the section model."
)
"""Description of a setting that names a checkpoint."""


class SubjectSettings(Settings):
    """The checkpoint that is evaluated."""

    model_config = ConfigDict(title="Subject")

    checkpoint: str = Field(min_length=1, description=CHECKPOINT)


class SweepSettings(Settings):
    """Checkpoints and seeds; every checkpoint is evaluated with every seed."""

    model_config = ConfigDict(title="Sweep")

    checkpoints: list[str] = Field(min_length=1, description=f"Each: {CHECKPOINT[0].lower()}{CHECKPOINT[1:]}")
    seeds: list[NonNegativeInt] = Field(min_length=1)
    """Seeds of the requests; each gives one evaluation per checkpoint."""


class ModelSections(Sections):
    """Base of recipes in which a model plays an environment."""

    if TYPE_CHECKING:  # each recipe places these fields among its sections
        model: ModelSettings
        environment: EnvironmentSettings
        inference: ServerSettings
        evaluation: EvaluationSettings

    @model_validator(mode="before")
    @classmethod
    def _break_down_by_kind(cls, values: Any) -> Any:
        """Set `evaluation.kind_field` for a mixture and for a table with a column `kind`, unless the recipe sets it."""
        environment, evaluation = values.get("environment"), values.get("evaluation")
        if not isinstance(environment, Mapping) or not isinstance(evaluation, Mapping) or "kind_field" in evaluation:
            return values
        args, name = environment.get("args"), environment.get("name")
        has_kind = name == "dataset" and isinstance(args, Mapping) and args.get("kind")
        field = "environment" if name == "mixture" else "kind" if has_kind else ""
        return {**values, "evaluation": {**evaluation, "kind_field": field}} if field else values

    def refuse_ahead(self) -> None:
        """Check the environment's rewards, the number of its images and videos, and `evaluation.kind_field`, before
        tasks are made.

        Raises:
            ConfigurationError: a reward cannot be made, a prompt has more images or videos than the servers accept, or
                the tasks have no field `evaluation.kind_field`.
        """
        from armature.components.environments.make import first_task, refuse_ahead, task_kind

        field = self.evaluation.kind_field
        servers = self.inference
        refuse_ahead(self.environment, field, servers.max_images_per_prompt, servers.max_videos_per_prompt)
        if field and (task := first_task(self.environment)) is not None:
            task_kind(task, field)

    def settings_for(self, settings: type[SettingsT]) -> SettingsT:
        """Return the settings of a section, see `Sections.settings_for`.

        Environments that show texts from other sources also get the model's special tokens as `reserved_tokens`, since
        no such text may contain them.

        Raises:
            ConfigurationError, DataError: see `reserved_tokens`.
        """
        section = super().settings_for(settings)
        if not isinstance(section, EnvironmentSettings):
            return section
        return section.model_copy(update={"args": self._reserving(section.name, section.args)})

    def _reserving(self, name: str, args: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments of the environment `name` with the model's special tokens as `reserved_tokens`."""
        if name == "mixture":
            parts = {
                part: each | {"args": self._reserving(each["name"], each["args"])}
                for part, each in args["parts"].items()
            }
            return {"parts": parts}
        if "reserved_tokens" not in args:
            return args
        from armature.components.models.reserved_tokens import reserved_tokens  # importing the hub's client takes long

        tokens = reserved_tokens(self.model, images_only=args.get("allow_special_tokens", False))
        return args | {"reserved_tokens": sorted({*args["reserved_tokens"], *tokens})}


class Evaluate(ModelSections):
    """Recipe: play every task of some splits with one checkpoint and report how many were solved."""

    FLOW = "armature.flows.evaluate.evaluate"

    subject: SubjectSettings
    """The checkpoint to evaluate."""
    model: ModelSection
    environment: EnvironmentSection
    inference: ServerSection
    evaluation: EvaluationSection
    machine: MachineSection = Machine()


class Sweep(ModelSections):
    """Recipe: evaluate each of several checkpoints with each of several seeds. A failing evaluation does not stop the
    others."""

    FLOW = "armature.flows.sweep.sweep"

    sweep: SweepSettings
    """The checkpoints and the seeds."""
    model: ModelSection
    environment: EnvironmentSection
    inference: ServerSection
    evaluation: EvaluationSection
    machine: MachineSection = Machine()
