"""Recipes: `configs/<flow>/<deployment>.toml`, or any file that says its `flow`; validated section by section.

A file may extend another (`extends = "base.toml"`, relative to itself; without the suffix, the installed recipe of that
name); its tables are merged over the base's.
`extends = {file = "base.toml", sections = ["model"]}` takes only these of its sections.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from armature.components.configuration.problems import SHORT, code_of, explain, place, settings_in
from armature.components.configuration.recipes import RECIPES, Sections, SettingsT
from armature.components.configuration.tables import SUFFIX, Written, merge, parse_override, read_toml
from armature.components.contracts.errors import ConfigurationError
from armature.components.contracts.installation import CONFIGS, DISTRIBUTION
from armature.components.contracts.machine import Machine
from armature.components.machine.project import project
from armature.components.machine.registry import suggestion

__all__ = [
    "CONFIGS",
    "SUFFIX",
    "Recipe",
    "SectionsT",
    "build_recipe",
    "explain",
    "load_recipe",
    "merge",
    "parse_override",
    "read_toml",
    "recipe_from_file",
    "recipe_kind",
    "recipe_names",
    "recipe_path",
    "section_of",
    "sections_of",
    "settings_in",
]

SectionsT = TypeVar("SectionsT", bound=Sections)


@dataclass(frozen=True)
class Recipe:
    """A flow with every value that it needs."""

    name: str  # "<flow>/<deployment>"
    description: str
    values: Sections
    kind: str  # key of RECIPES
    folder: Path | None = None
    """Where the relative paths of its values begin; None: in the working folder."""

    @property
    def flow(self) -> str:
        return self.kind.partition("/")[0]

    @property
    def machine(self) -> Machine:
        return self.values.machine

    @cached_property
    def sections(self) -> Mapping[str, BaseModel]:
        """The sections by name, without optional ones that are left out."""
        return self.values.given()

    def dump(self) -> dict[str, Any]:
        """The resolved values, as JSON."""
        return {name: section.model_dump(mode="json") for name, section in self.sections.items()}

    def settings_for(self, settings: type[SettingsT]) -> SettingsT:
        """Return the settings of a stage, see `Sections.settings_for`."""
        return self.values.settings_for(settings)


def recipe_kind(name: str, where: str = "") -> str:
    """The key in RECIPES of the recipe called `name`.

    Raises:
        ConfigurationError: there is no such flow.
    """
    kind = name if name in RECIPES else name.partition("/")[0]
    if kind not in RECIPES:
        remedy = suggestion(kind, RECIPES)
        raise ConfigurationError(f"no flow is called {kind!r}", code="unknown_flow", where=where, remedy=remedy)
    return kind


def recipe_path(name: str) -> Path:
    """The file of an installed recipe, or the file that is named.

    Raises:
        ConfigurationError: there is no such recipe; the nearest one is suggested.
    """
    if name.endswith(SUFFIX):
        return Path(name)
    if name not in (names := recipe_names()):
        remedy = f"{suggestion(name, names)}; or give the path of a file, which ends with {SUFFIX}"
        raise ConfigurationError(f"no recipe is called {name!r}", code="unknown_recipe", remedy=remedy)
    return CONFIGS / f"{name}{SUFFIX}"


def recipe_names() -> list[str]:
    """Every `<flow>/<deployment>`; folders and files that begin with an underscore are only there to be extended.

    Raises:
        ConfigurationError: there are none, so the installation is not complete.
    """
    names = [f"{path.parent.name}/{path.stem}" for path in sorted(CONFIGS.glob("*/*.toml"))]
    if not names:
        raise ConfigurationError(
            "no recipes are installed",
            code="recipes_missing",
            where=str(CONFIGS),
            remedy=f"pip install --force-reinstall {DISTRIBUTION}; in a checkout: git restore configs components",
        )
    return [name for name in names if not name.startswith("_") and "/_" not in name]


def load_recipe(name: str | Path, overrides: Iterable[str] = ()) -> Recipe:
    """The installed recipe called `name`, or that in a file, with `--set` overrides on top.

    Relative paths in a file begin at its folder. It says its `flow`, or its folder is called so.
    """
    path = recipe_path(str(name))
    resolved = Path(os.path.realpath(path))  # no error for a link to itself
    if resolved.is_relative_to(CONFIGS):
        return recipe_from_file(path, resolved.relative_to(CONFIGS).with_suffix("").as_posix(), overrides)
    return recipe_from_file(path, f"{resolved.parent.name}/{path.stem}", overrides, folder=path.parent)


def recipe_from_file(path: Path, name: str, overrides: Iterable[str] = (), *, folder: Path | None = None) -> Recipe:
    """
    Args:
        name: `<flow>/<deployment>`; what the file says of its flow comes first.
        folder: see `Recipe`.
    """
    values = read_toml(path)
    for override in overrides:
        values = merge(values, parse_override(override))
    return build_recipe(name, values, str(path), folder)


def build_recipe(name: str, values: Mapping[str, Any], where: str, folder: Path | None = None) -> Recipe:
    """
    Raises:
        ConfigurationError: an unknown or missing section or key, or a value out of bounds.
    """
    values = dict(values)
    if "flow" in values:
        flow, (_, _, deployment) = str(values.pop("flow")), name.rpartition("/")
        kind = recipe_kind(flow, where)
        name = f"{kind.partition('/')[0]}/{deployment}"
    elif folder is not None and name.partition("/")[0] not in RECIPES:
        remedy = f'write flow = "train-vlm" above its sections; known: {", ".join(sorted(RECIPES))}'
        raise ConfigurationError("the recipe does not say its flow", code="flow_missing", where=where, remedy=remedy)
    else:
        kind = recipe_kind(name, where)
    description = values.pop("description", "")
    if not isinstance(description, str):
        raise ConfigurationError(
            f"description is not a string: {SHORT.repr(description)}", code="invalid_description", where=where
        )
    with project(folder):
        return Recipe(name, description, sections_of(RECIPES[kind], values, where), kind, folder)


def sections_of(kind: type[SectionsT], values: Mapping[str, Any], where: str = "") -> SectionsT:
    """Validate sections, each of them and all together. Sections that are valid already stay as they are.

    Raises:
        ConfigurationError: an unknown or missing section or key, or a value out of bounds, or sections that do not fit
            each other.
    """
    if unknown := sorted(set(values) - set(kind.model_fields)):
        raise ConfigurationError(
            f"unknown section {unknown[0]!r}",
            code="unknown_section",
            where=where,
            remedy=suggestion(unknown[0], kind.model_fields),
        )
    omitted: dict[str, Any] = {name: {} for name in kind.model_fields if name not in kind.optional()}
    try:
        return _validate(kind, omitted | dict(values))
    except ValidationError as error:
        raise ConfigurationError(explain(error, "", kind), code=code_of(error), where=where) from error


def _validate(model: type[SettingsT], values: Mapping[str, Any]) -> SettingsT:
    """The settings, in which the numbers of overrides stand as they were written where a string or path is asked for.

    Raises:
        ValidationError: an unknown key, or a value out of bounds.
    """
    try:
        return model.model_validate(values)
    except ValidationError as error:
        strings = [each for each in error.errors() if each["type"] in ("string_type", "path_type")]
        numbers = [each for each in strings if isinstance(each["input"], Written)]
        if not numbers:
            raise
    for problem in numbers:
        written: Any = problem["input"].text
        for part in reversed(place(model, problem["loc"])[0]):
            written = {part: written}
        values = merge(values, written)
    return model.model_validate(values)


def section_of(
    model: type[SettingsT], values: Mapping[str, Any], where: str, overrides: Iterable[str] = ()
) -> SettingsT:
    """One section from `values` and KEY=VALUE overrides of it.

    Raises:
        ConfigurationError: an unknown key, or a value out of bounds.
    """
    for override in overrides:
        values = merge(values, parse_override(override))
    try:
        return _validate(model, values)
    except ValidationError as error:
        raise ConfigurationError(
            explain(error, model.__name__.removesuffix("Settings").lower(), model), code=code_of(error), where=where
        ) from error
