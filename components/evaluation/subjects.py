"""Recipes that evaluate one checkpoint, or each of several checkpoints with each of several seeds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from pydantic import ConfigDict, Field, NonNegativeInt

from armature.components.contracts.machine import Machine
from armature.components.contracts.settings import Settings
from armature.components.environments.settings import EnvironmentSettings
from armature.components.evaluation.settings import EvaluationSettings
from armature.components.inference.settings import ServerSettings
from armature.components.models.settings import ModelSettings
from armature.components.recipes import MachineSection, Sections, SettingsT

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
    seeds: list[NonNegativeInt] = Field(min_length=1, description="Seeds of the requests, one evaluation each.")


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

    subject: SubjectSettings = Field(description="The checkpoint.")
    model: ModelSection
    environment: EnvironmentSection
    inference: ServerSection
    evaluation: EvaluationSection
    machine: MachineSection = Machine()


class Sweep(ModelSections):
    """Evaluate checkpoints times seeds; a cell that fails takes no other with it."""

    FLOW = "armature.flows.sweep.sweep"

    sweep: SweepSettings = Field(description="The checkpoints and the seeds.")
    model: ModelSection
    environment: EnvironmentSection
    inference: ServerSection
    evaluation: EvaluationSection
    machine: MachineSection = Machine()
