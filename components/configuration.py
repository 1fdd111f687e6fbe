"""Recipes: `configs/<flow>/<deployment>.toml`, or any file that says its `flow`; validated section by section.

A file may extend another (`extends = "base.toml"`, relative to itself; without the suffix, the installed recipe of that
name); its tables are merged over the base's.
`extends = {file = "base.toml", sections = ["model"]}` takes only these of its sections.
"""

from __future__ import annotations

import os
import re
import reprlib
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin

from pydantic import BaseModel, ValidationError, model_validator

from components.contracts.errors import ConfigurationError
from components.contracts.secrets import PLAIN_SECRET
from components.contracts.settings import FORMER_KEY, InvalidTable, Settings
from components.installation import CONFIGS, DISTRIBUTION
from components.project import project
from components.recipes import RECIPES, Sections
from components.registry import suggestion

LARGEST_FILE, DEEPEST = 2**22, 32
"""Bytes of a TOML file, and parts of an override's dotted key."""
SectionsT = TypeVar("SectionsT", bound=Sections)
SettingsT = TypeVar("SettingsT", bound=BaseModel)
_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 200
SUFFIX = ".toml"
INSTALLED = re.compile(r"[\w-]+/[\w-]+")
TAKEN_AWAY = object()
"""In place of a value in overrides: the setting, or the section, is left out."""


class _Written:
    """A number of an override, and how it was written: a setting that is a string takes that (a digest like 12e456)."""

    text: str


class _Int(_Written, int): ...


class _Float(_Written, float): ...


@dataclass(frozen=True)
class Recipe:
    """A flow with every value that it needs. An optional section that is left out is not in `sections`."""

    name: str  # "<flow>/<deployment>"
    description: str
    sections: Mapping[str, BaseModel]
    kind: str  # key of RECIPES
    folder: Path | None = None
    """Where the relative paths of its values begin; None: in the working folder."""

    @property
    def flow(self) -> str:
        return self.kind.partition("/")[0]

    def dump(self) -> dict[str, Any]:
        """The resolved values, as JSON."""
        return {name: section.model_dump(mode="json") for name, section in self.sections.items()}

    def settings_for(self, settings: type[BaseModel]) -> BaseModel:
        """The settings of a stage: a section of that type, or sections joined under its field names."""
        for section in self.sections.values():
            if type(section) is settings:
                return section
        return settings.model_validate({name: self.sections[name] for name in settings.model_fields})


def recipe_kind(name: str, where: str = "") -> str:
    """The key in RECIPES of the recipe called `name`.

    Raises:
        ConfigurationError: there is no such flow.
    """
    kind = name if name in RECIPES else name.partition("/")[0]
    if kind not in RECIPES:
        remedy = suggestion(kind, RECIPES)
        raise ConfigurationError(f"no flow is called {kind!r}", where=where, remedy=remedy)
    return kind


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`over` on top of `base`, table by table; lists and scalars are replaced whole, and what is `TAKEN_AWAY` goes."""
    merged = dict(base)
    for key, value in over.items():
        if value is TAKEN_AWAY:
            merged.pop(key, None)
            continue
        old = merged.get(key)
        merged[key] = merge(old if isinstance(old, Mapping) else {}, value) if isinstance(value, Mapping) else value
    return merged


def read_toml(path: Path, seen: tuple[Path, ...] = ()) -> dict[str, Any]:
    """The file's values over those of the files that it extends.

    Raises:
        ConfigurationError: missing, not TOML, or extending itself.
    """
    path = Path(os.path.abspath(path))  # noqa: PTH100 (resolve would fail at a link to itself)
    if path in seen:
        chain = " -> ".join(each.name for each in (*seen, path))
        raise ConfigurationError(f"configurations extend each other in a circle: {chain}", where=str(path))
    values = _parse(path)
    if "extends" not in values:
        return values
    try:
        base = Extends.model_validate(values.pop("extends"))
    except ValidationError as error:
        raise ConfigurationError(
            explain(error, "extends", Extends), where=str(path), remedy=str(Extends.__doc__)
        ) from error
    extended = CONFIGS / f"{base.file}{SUFFIX}" if INSTALLED.fullmatch(base.file) else path.parent / base.file
    inherited = read_toml(extended, (*seen, path))
    kept = {key: value for key, value in inherited.items() if base.sections is None or key in base.sections}
    return merge(kept, values)


class Extends(Settings):
    """Write extends = "base.toml", or extends = {file = "base.toml", sections = ["model"]}.

    In place of a file, also an installed recipe: extends = "train-vlm/colors".
    """

    file: str
    sections: tuple[str, ...] | None = None

    @model_validator(mode="before")
    @classmethod
    def _from_a_name(cls, value: Any) -> Any:
        return {"file": value} if isinstance(value, str) else value


def _parse(path: Path) -> dict[str, Any]:
    missing = ConfigurationError(f"TOML config not found: {path}", remedy="armature list shows what there is")
    try:
        if not path.exists():
            raise missing
        if not path.is_file() or path.stat().st_size > LARGEST_FILE:
            raise ConfigurationError(f"not a file of at most {LARGEST_FILE} bytes", where=str(path))
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except UnicodeDecodeError as error:
        raise ConfigurationError(f"not valid TOML, which is UTF-8: {error}", where=str(path)) from error
    except RecursionError as error:
        raise ConfigurationError("not valid TOML: too deeply nested", where=str(path)) from error
    except ValueError as error:
        raise ConfigurationError(f"not valid TOML: {error}", where=str(path)) from error
    except OSError as error:
        raise ConfigurationError(f"the file cannot be read: {error.strerror}", where=str(path)) from error


def parse_override(text: str) -> dict[str, Any]:
    """`a.b=value` as nested tables; the value is TOML, a bare word is a string, and none takes away what is there.

    Raises:
        ConfigurationError: it is of another form.
    """
    key, separator, value = text.partition("=")
    parts = [part.strip() for part in key.split(".")]
    broken = any(character == "\0" or "\ud800" <= character <= "\udfff" for character in text)
    if not separator or not all(parts) or len(parts) > DEEPEST or broken:
        raise ConfigurationError(f"invalid override: {_SHORT.repr(text)}", remedy="write --set section.key=value")
    parsed: Any = TAKEN_AWAY
    if value.strip():
        try:
            parsed, *more = tomllib.loads(f"value = {value}").values()
            if more:
                raise ConfigurationError(f"not one override: {_SHORT.repr(text)}", remedy="write a --set for each")
        except tomllib.TOMLDecodeError:
            parsed = value
        except (ValueError, RecursionError) as error:  # a number of thousands of digits, or too deeply nested
            raise ConfigurationError(f"invalid override: {_SHORT.repr(text)}: {error}", where=key) from error
    if type(parsed) in (int, float):
        parsed = _Int(parsed) if isinstance(parsed, int) else _Float(parsed)
        parsed.text = value.strip()
    for part in reversed(parts):
        parsed = {part: parsed}
    return dict(parsed)


def recipe_path(name: str) -> Path:
    """The file of an installed recipe, or the file that is named.

    Raises:
        ConfigurationError: there is no such recipe; the nearest one is suggested.
    """
    if name.endswith(SUFFIX):
        return Path(name)
    if name not in (names := recipe_names()):
        remedy = f"{suggestion(name, names)}; or give the path of a file, which ends with {SUFFIX}"
        raise ConfigurationError(f"no recipe is called {name!r}", remedy=remedy)
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
            where=str(CONFIGS),
            remedy=f"pip install --force-reinstall {DISTRIBUTION}; in a checkout: git restore configs components",
        )
    return [name for name in names if not name.startswith("_") and "/_" not in name]


def load_recipe(name: str | Path, overrides: Iterable[str] = ()) -> Recipe:
    """The installed recipe called `name`, or that in a file, with `--set` overrides on top.

    Relative paths in a file begin at its folder. It says its `flow`, or its folder is called so.
    """
    path = recipe_path(str(name))
    resolved = path.resolve()
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
        raise ConfigurationError("the recipe does not say its flow", where=where, remedy=remedy)
    else:
        kind = recipe_kind(name, where)
    description = values.pop("description", "")
    if not isinstance(description, str):
        raise ConfigurationError(f"description is not a string: {_SHORT.repr(description)}", where=where)
    with project(folder):
        return Recipe(name, description, _sections(RECIPES[kind], values, where), kind, folder)


def _sections(kind: type[Sections], values: Mapping[str, Any], where: str) -> dict[str, BaseModel]:
    known = kind.model_fields
    if unknown := sorted(set(values) - set(known)):
        raise ConfigurationError(f"unknown section {unknown[0]!r}", where=where, remedy=suggestion(unknown[0], known))
    sections = {}
    for section in known:
        if section not in values and section in kind.optional():
            continue
        (model,) = settings_in(known[section].annotation)
        try:
            sections[section] = _validate(model, values.get(section, {}))
        except ValidationError as error:
            raise ConfigurationError(explain(error, section, model), where=where) from error
    return fitting(kind, sections, where).given()


def _validate(model: type[SettingsT], values: Mapping[str, Any]) -> SettingsT:
    """The settings, in which the numbers of overrides stand as they were written where a string is asked for.

    Raises:
        ValidationError: an unknown key, or a value out of bounds.
    """
    try:
        return model.model_validate(values)
    except ValidationError as error:
        strings = [each for each in error.errors() if each["type"] == "string_type"]
        numbers = [each for each in strings if isinstance(each["input"], _Written)]
        if not numbers:
            raise
    for problem in numbers:
        written: Any = problem["input"].text
        for part in reversed(_place(model, problem["loc"])[0]):
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
            explain(error, model.__name__.removesuffix("Settings").lower(), model), where=where
        ) from error


def fitting(kind: type[SectionsT], sections: Mapping[str, Any], where: str = "") -> SectionsT:
    """The sections, which are valid each, together.

    Raises:
        ConfigurationError: they do not fit each other.
    """
    try:
        return kind.model_validate(sections)
    except ValidationError as error:
        what = error.errors()[0]["msg"].removeprefix("Value error, ")
        raise ConfigurationError(what, where=where) from error


def explain(error: ValidationError, section: str, model: type[BaseModel]) -> str:
    """Each problem on a line of its own, with the dotted key, the value given, and the nearest known key."""
    lines = []
    for problem in error.errors():
        cause = problem.get("ctx", {}).get("error")
        if isinstance(cause, InvalidTable):
            lines.append(explain(cause.error, ".".join([section, *map(str, problem["loc"])]), cause.model))
            continue
        path, variant, known = _place(model, problem["loc"])
        key = ".".join([section, *path])
        line = f"{key}: {problem['msg'].removeprefix('Value error, ')}"
        if problem["type"] == "extra_forbidden":
            line = f"{key} is not a setting{f' of {variant!r}' if variant else ''}; {suggestion(path[-1], known)}"
        elif problem["type"] == "union_tag_not_found":
            discriminator = problem["ctx"]["discriminator"].strip("'")
            line = f"{key}.{discriminator}: Field required"
        elif problem["type"] not in ("missing", PLAIN_SECRET, FORMER_KEY):
            line += f" (given {_SHORT.repr(problem['input'])})"
        lines.append(line)
    return "\n".join(lines)


def _place(model: type[BaseModel], location: Sequence[str | int]) -> tuple[list[str], str, Iterable[str]]:
    """The keys to what a validation error is about, the variant of a union that it is in, and the keys known there."""
    *parents, last = location or ("",)
    path, variant, classes = [], "", [model]
    for part in parents:
        if len(classes) > 1 and (chosen := [each for each in classes if part in _tags(each)]):
            variant, classes = str(part), chosen
            continue
        path.append(str(part))
        if len(classes) == 1 and part in classes[0].model_fields:
            variant, classes = "", list(settings_in(classes[0].model_fields[str(part)].annotation))
    known = classes[0].model_fields if len(classes) == 1 else ()
    return [*path, *([str(last)] if location else [])], variant, known


def _tags(model: type[BaseModel]) -> set[Any]:
    """What the fields of a variant that are literals may be, one of which names it."""
    literals = [field.annotation for field in model.model_fields.values() if get_origin(field.annotation) is Literal]
    return {value for each in literals for value in get_args(each)}


def settings_in(annotation: Any) -> Iterator[type[BaseModel]]:
    """The settings classes in a type: of a union, of a list, of a mapping's values."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in get_args(annotation):
        yield from settings_in(part)
