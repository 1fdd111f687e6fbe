"""Loading and validation of recipes: `configs/<flow>/<deployment>.toml`, or any TOML file that names its `flow`.

A file may extend a base file, and its tables are merged over the tables of the base: `extends = "base.toml"` is a path
relative to the file, `extends = "train-vlm/colors"` names an installed recipe, and
`extends = {file = "base.toml", sections = ["model"]}` inherits only the listed sections, and
`extends = {file = "base.toml", without = ["evaluation"]}` all but the listed sections and settings.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from armature.components.configuration.problems import SHORT, code_of, explain, explained, meant, place, settings_in
from armature.components.configuration.recipes import RECIPES, Sections, SettingsT
from armature.components.configuration.tables import (
    SUFFIX,
    Written,
    closest,
    installed_names,
    merge,
    parse_override,
    read_toml,
)
from armature.components.contracts.errors import ConfigurationError
from armature.components.contracts.installation import CONFIGS, DISTRIBUTION
from armature.components.contracts.machine import Machine
from armature.components.machine.project import project
from armature.components.machine.registry import nearest, suggestion

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
    """A flow with all values of its sections.

    Example:
        >>> recipe = load_recipe("train-vlm/colors", ["trainer.max_steps=20"])
        >>> recipe.flow, recipe.sections["trainer"].max_steps
        ('train-vlm', 20)
    """

    name: str  # "<flow>/<deployment>"
    description: str
    values: Sections
    kind: str  # key of RECIPES
    folder: Path | None = None
    """Folder to which relative paths in the values refer; None: the working folder."""
    gpu_gib: int | None = None
    """GiB of memory that each of its GPUs needs; None: not known."""

    @property
    def flow(self) -> str:
        """Name of the flow, such as "train-vlm"."""
        return self.kind.partition("/")[0]

    @property
    def machine(self) -> Machine:
        """The recipe's section `machine`."""
        return self.values.machine

    @cached_property
    def sections(self) -> Mapping[str, BaseModel]:
        """The sections by name, without the optional sections that the recipe omits."""
        return self.values.given()

    def dump(self) -> dict[str, Any]:
        """Return all values, including defaults, as JSON types."""
        return {name: section.model_dump(mode="json") for name, section in self.sections.items()}

    def settings_for(self, settings: type[SettingsT]) -> SettingsT:
        """Return the settings of the stage whose settings class is `settings`, made from the recipe's sections."""
        return self.values.settings_for(settings)


def recipe_kind(name: str, where: str = "") -> str:
    """Return the key in RECIPES of the recipe called `name`.

    Raises:
        ConfigurationError: there is no such flow.
    """
    kind = name if name in RECIPES else name.partition("/")[0]
    if kind not in RECIPES:
        remedy = suggestion(kind, RECIPES)
        raise ConfigurationError(f"no flow is called {kind!r}", code="unknown_flow", where=where, remedy=remedy)
    return kind


def recipe_path(name: str) -> Path:
    """Return the file of an installed recipe, or `name` itself if it is a TOML file.

    Raises:
        ConfigurationError: there is no such recipe; the nearest one is suggested.
    """
    path, names = Path(name), recipe_names()
    if name.endswith(SUFFIX) and (os.path.lexists(path) or name.removesuffix(SUFFIX) not in names):
        return path
    if name not in names:
        remedy = f"{closest(name, names)}; or give the path of a file, which ends with {SUFFIX}"
        if name.endswith(SUFFIX):
            remedy = f"did you mean {name.removesuffix(SUFFIX)!r}? A name with {SUFFIX} is the path of a file"
        elif os.path.isfile(beside := f"{name}{SUFFIX}"):  # noqa: PTH113 (any text may be asked about)
            remedy = f"did you mean the file {beside!r}?"
        elif os.path.isdir(name) and (inside := sorted(map(str, path.glob(f"*{SUFFIX}")))):  # noqa: PTH112
            remedy = f"did you mean the file {inside[0]!r}? {name!r} is a folder"
        raise ConfigurationError(f"no recipe is called {name!r}", code="unknown_recipe", remedy=remedy)
    return CONFIGS / f"{name}{SUFFIX}"


def recipe_names() -> list[str]:
    """Return the names `<flow>/<deployment>` of all installed recipes, sorted.

    Raises:
        ConfigurationError: there are no recipes, so the installation is incomplete.
    """
    names = installed_names(CONFIGS)
    if not names:
        raise ConfigurationError(
            "no recipes are installed",
            code="recipes_missing",
            where=str(CONFIGS),
            remedy=f"pip install --force-reinstall {DISTRIBUTION}; in a checkout: git restore configs components",
        )
    return names


def load_recipe(name: str | Path, overrides: Iterable[str] = ()) -> Recipe:
    """Load an installed recipe by name, or a recipe file, and apply KEY=VALUE overrides as of `--set`.

    Relative paths in a recipe file refer to its folder. The file names its `flow`, or lies in a folder of that name.
    """
    path = recipe_path(str(name))
    resolved = Path(os.path.realpath(path))  # no error for a link to itself
    if resolved.is_relative_to(CONFIGS):
        return recipe_from_file(path, resolved.relative_to(CONFIGS).with_suffix("").as_posix(), overrides)
    return recipe_from_file(path, f"{resolved.parent.name}/{path.stem}", overrides, folder=path.parent)


def recipe_from_file(path: Path, name: str, overrides: Iterable[str] = (), *, folder: Path | None = None) -> Recipe:
    """Load a recipe from a file and apply KEY=VALUE overrides.

    Args:
        name: `<flow>/<deployment>`; a `flow` in the file takes precedence.
        folder: see `Recipe`.
    """
    values = read_toml(path)
    for override in overrides:
        values = merge(values, parse_override(override))
    return build_recipe(name, values, str(path), folder)


def build_recipe(name: str, values: Mapping[str, Any], where: str, folder: Path | None = None) -> Recipe:
    """Validate the values of a recipe; `where` names their source in errors.

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
    gib = values.pop("gpu_gib", None)
    if not (gib is None or (isinstance(gib, int) and gib is not True and gib > 0)):
        raise ConfigurationError(
            f"gpu_gib is not a number of GiB: {SHORT.repr(gib)}", code="invalid_gpu_gib", where=where
        )
    with project(folder):
        return Recipe(name, description, sections_of(RECIPES[kind], values, where), kind, folder, gib)


def sections_of(kind: type[SectionsT], values: Mapping[str, Any], where: str = "") -> SectionsT:
    """Validate sections, each one and all together. Values that are settings objects already are not changed.

    One error shows the problems of all sections, unknown sections included.

    Raises:
        ConfigurationError: an unknown or missing section or key, or a value out of bounds, or sections that do not fit
            each other.
    """
    unknown = sorted(set(values) - set(kind.model_fields))
    lines = [f"unknown section {name!r}; {meant([name], kind.model_fields, kind)}" for name in unknown]
    omitted: dict[str, Any] = {name: {} for name in kind.model_fields if name not in kind.optional()}
    known = {name: value for name, value in values.items() if name in kind.model_fields}
    for name in unknown:  # a misspelled section is checked with the others, and is not missing
        if (section := nearest(name, sorted(kind.model_fields))) and section not in known:
            known[section] = values[name]
    code, invalid = "unknown_section", None
    try:
        sections = _validate(kind, omitted | known)
    except ValidationError as error:
        code, invalid = code if unknown else code_of(error), error
        lines.append(explain(error, "", kind))
    if lines:
        raise ConfigurationError("\n".join(lines), code=code, where=where) from invalid
    return sections


def _validate(model: type[SettingsT], values: Mapping[str, Any]) -> SettingsT:
    """Return the section of class `model`, validated from `values`.

    If a field requires a string or a path and an override gives a number, the field gets the text of the override: the
    digest 12e456 must not become a float.

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
    """Return one section, validated from `values` and KEY=VALUE overrides.

    Raises:
        ConfigurationError: an unknown key, or a value out of bounds.
    """
    for override in overrides:
        values = merge(values, parse_override(override))
    with explained(model, where, model.__name__.removesuffix("Settings").lower()):
        return _validate(model, values)
