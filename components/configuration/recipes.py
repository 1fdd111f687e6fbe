"""The base class of recipes, and the registry of all recipe classes.

Each flow has a class whose fields are the sections of its TOML files and the parameters of the flow. The class is
declared beside its stages and registered here by name, so a process imports only the settings of its own recipe.
Optional sections may be omitted, which disables that part of the run. A required section may be omitted too if every
field in it has a default.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Self, TypeVar

from pydantic import BaseModel, Field, PrivateAttr, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from armature.components.contracts.errors import ConfigurationError
from armature.components.contracts.machine import Machine
from armature.components.contracts.settings import Settings
from armature.components.contracts.stages import Artifact
from armature.components.machine.registry import Registry

MachineSection = Annotated[Machine, Field(description="Facts of this machine; none changes the result.")]
SettingsT = TypeVar("SettingsT", bound=BaseModel)


@dataclass(frozen=True)
class SettingRow:
    """The result of checking that one setting acts."""

    setting: str
    expectation: str
    observed: str
    acts: bool | None
    """True if the setting acts as expected; None if the recipe does not set it."""


class Sections(BaseModel):
    """The sections of a recipe, `machine` among them."""

    model_config = Settings.model_config

    FLOW: ClassVar[str]
    """Dotted path of the Prefect flow, valid in a checkout and in an installed wheel."""
    JOINED: ClassVar[tuple[type[BaseModel], ...]] = ()
    """Settings classes of stages whose fields are several sections. Such a class may refuse a combination of sections
    that are valid one by one."""
    FIRST_STAGES: ClassVar[tuple[str, ...]] = ()
    """Stages without inputs. `armature check` runs them, because they fail early if a model is missing."""
    MEMORY: ClassVar[str] = ""
    """"module:function" that returns the RecipeMemory of these sections; "" for recipes without a trainer or policy."""
    PLAN: ClassVar[str] = ""
    """"module:function" that plans the steps of these sections; "" for recipes without rollouts."""

    if TYPE_CHECKING:  # each recipe places this field among its sections
        machine: Machine
    _joined: dict[type[BaseModel], BaseModel] = PrivateAttr(default_factory=dict)

    @model_validator(mode="after")
    def _validate_joined_sections(self) -> Self:
        """Validate combined sections when the recipe is loaded, not hours later when the last stage begins."""
        values = self.given()
        for stage in self.JOINED:
            if {name for name, field in stage.model_fields.items() if field.is_required()} <= values.keys():
                try:
                    self._joined[stage] = _join(stage, values)
                except ValidationError as error:
                    messages = [problem["msg"].removeprefix("Value error, ") for problem in error.errors()]
                    raise PydanticCustomError(error.errors()[0]["type"], "\n".join(messages)) from error
        return self

    @classmethod
    def optional(cls) -> frozenset[str]:
        """Return the names of the sections that a recipe may omit to disable them."""
        return frozenset(name for name, field in cls.model_fields.items() if field.default is None)

    def given(self) -> dict[str, BaseModel]:
        """Return the sections by name, without the optional sections that the recipe omits."""
        return {name: section for name in type(self).model_fields if (section := getattr(self, name)) is not None}

    def settings_for(self, settings: type[SettingsT]) -> SettingsT:
        """Return the settings of the stage whose settings class is `settings`.

        They are the section of this class, if there is one. Otherwise they are an instance of the class whose fields
        are the sections of the same names.
        """
        sections = self.given()
        section: Any = next((each for each in sections.values() if type(each) is settings), self._joined.get(settings))
        return _join(settings, sections) if section is None else section

    def refuse_sources(self) -> None:
        """Check that the first stages can fetch the named models, without fetching them.

        Raises:
            ConfigurationError: a hub name has no revision.
            DataError: a named folder does not exist.
        """

    def refuse_ahead(self) -> None:
        """Check for errors that would otherwise occur minutes later, without starting anything.

        Raises:
            ConfigurationError: the recipe names something that does not exist.
        """

    def check_stages(self, inputs: Mapping[str, Artifact], say: Callable[[str], None]) -> None:
        """Run the checks that need the artifacts of the first stages.

        Raises:
            ArmatureError: the recipe cannot run here.
        """

    def check_settings(self, inputs: Mapping[str, Artifact], say: Callable[[str], None]) -> list[SettingRow]:
        """Run the checks of `check_stages`, and check that settings act.

        Raises:
            ArmatureError: the recipe cannot run here, or no check of its settings exists.
        """
        raise ConfigurationError(
            "only settings of train-vlm can be checked",
            code="settings_not_checked",
            where="--settings",
            remedy="leave --settings out",
        )


def _join(settings: type[SettingsT], sections: Mapping[str, BaseModel]) -> SettingsT:
    """Return an instance of `settings` whose fields are the sections of the same names, as far as they are given."""
    return settings.model_validate({name: sections[name] for name in settings.model_fields if name in sections})


_ROBOTS = "armature.components.robots.recipes"

RECIPES = Registry(
    "flow",
    "armature.recipes",
    {
        "alfworld-games": "armature.components.environments.alfworld.stage:AlfworldGames",
        "quantile-stats": f"{_ROBOTS}:QuantileStats",
        "sft": "armature.components.vlm.sft.recipe:Sft",
        "train-vlm": "armature.components.rl.recipe:TrainVlm",
        "evaluate": "armature.components.evaluation.settings:Evaluate",
        "evaluate/sweep": "armature.components.evaluation.settings:Sweep",
        "demonstrations": f"{_ROBOTS}:Demonstrations",
        "train-vla": f"{_ROBOTS}:TrainVla",
        "train-vla-rl": f"{_ROBOTS}:TrainVlaRl",
        "evaluate/libero": f"{_ROBOTS}:EvaluateLibero",
        "evaluate/libero-perturbed": f"{_ROBOTS}:EvaluateLibero",
        "evaluate/libero-openpi": f"{_ROBOTS}:EvaluateLibero",
        "evaluate/libero-lerobot": f"{_ROBOTS}:EvaluateLibero",
        "evaluate/libero-sweep": f"{_ROBOTS}:SweepPolicies",
        "evaluate/metaworld": f"{_ROBOTS}:EvaluateBenchmark",
    },
)
"""Recipe classes. A key is the whole name of a recipe, or the name of a flow, for all other recipes of the flow."""
