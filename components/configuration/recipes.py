"""Recipes: for each flow a class whose fields are the sections of its TOML files, and the flow's parameters.

The class is declared beside its stages and registered here by name: a process imports the settings of its recipe alone.
A section that may be None can be left out, which means: without it. Every other one is made of defaults where a recipe
leaves it out, if it has them all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Self, TypeVar

from pydantic import BaseModel, Field, PrivateAttr, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from armature.components.contracts.machine import Machine
from armature.components.contracts.settings import Settings
from armature.components.contracts.stages import Artifact
from armature.components.machine.registry import Registry

MachineSection = Annotated[Machine, Field(description="Facts of this machine; none changes the result.")]
SettingsT = TypeVar("SettingsT", bound=BaseModel)


class Sections(BaseModel):
    """The sections of a recipe, `machine` among them."""

    model_config = Settings.model_config

    FLOW: ClassVar[str]
    """Dotted path of the Prefect flow: a worker finds it in a checkout and in an installed wheel alike."""
    JOINED: ClassVar[tuple[type[BaseModel], ...]] = ()
    """Settings of stages that join sections, and refuse some that are valid by themselves."""
    FIRST_STAGES: ClassVar[tuple[str, ...]] = ()
    """Stages that need no inputs: `armature check` runs them, because they fail early where a model is missing."""
    MEMORY: ClassVar[str] = ""
    """"module:function" that returns the RecipeMemory of these sections; "" for recipes without a trainer or policy."""
    PLAN: ClassVar[str] = ""
    """"module:function" that plans the steps of these sections; "" for recipes without rollouts."""

    if TYPE_CHECKING:  # each recipe places this field among its sections
        machine: Machine
    _joined: dict[type[BaseModel], BaseModel] = PrivateAttr(default_factory=dict)

    @model_validator(mode="after")
    def _stages_take_them_together(self) -> Self:
        """Before the first stage is run, not when the last one begins."""
        given = self.given()
        for stage in self.JOINED:
            if stage.model_fields.keys() <= given.keys():
                try:
                    self._joined[stage] = _join(stage, given)
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

    def settings_for(self, settings: type[SettingsT]) -> SettingsT:
        """Return the settings of a stage: the section of that type, or sections joined under its field names."""
        given = self.given()
        found: Any = next((each for each in given.values() if type(each) is settings), self._joined.get(settings))
        return _join(settings, given) if found is None else found

    def refuse_sources(self) -> None:
        """Refuse names of models that the first stages cannot fetch. Nothing is fetched.

        Raises:
            ConfigurationError: a hub name has no revision.
            DataError: there is no such folder.
        """

    def refuse_ahead(self) -> None:
        """Refuse what would fail minutes later, without starting anything.

        Raises:
            ConfigurationError: the recipe names something that is not there.
        """

    def check_stages(self, inputs: Mapping[str, Artifact], say: Callable[[str], None]) -> None:
        """Check what needs the artifacts of the first stages.

        Raises:
            ArmatureError: the recipe cannot run here.
        """


def _join(settings: type[SettingsT], sections: Mapping[str, BaseModel]) -> SettingsT:
    return settings.model_validate({name: sections[name] for name in settings.model_fields})


_ROBOTS = "armature.components.robots.recipes"

RECIPES = Registry(
    "flow",
    "armature.recipes",
    {
        "alfworld-games": "armature.components.environments.alfworld.stage:AlfworldGames",
        "quantile-stats": f"{_ROBOTS}:QuantileStats",
        "train-vlm": "armature.components.rl.recipe:TrainVlm",
        "evaluate": "armature.components.evaluation.settings:Evaluate",
        "evaluate/sweep": "armature.components.evaluation.settings:Sweep",
        "demonstrations": f"{_ROBOTS}:Demonstrations",
        "train-vla": f"{_ROBOTS}:TrainVla",
        "train-vla-rl": f"{_ROBOTS}:TrainVlaRl",
        "evaluate/libero": f"{_ROBOTS}:EvaluateLibero",
        "evaluate/libero-perturbed": f"{_ROBOTS}:EvaluateLibero",
    },
)
"""By a recipe's whole name, else by that of its flow."""
