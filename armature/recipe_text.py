"""A resolved recipe as TOML, in which what the recipe itself says is marked."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pydantic import BaseModel

from components.configuration import load_recipe, merge, parse_override, read_toml, recipe_path
from components.environments import ENVIRONMENTS
from components.environments.settings import EnvironmentSettings

RECIPE, OVERRIDE = "recipe", "--set"
BARE = re.compile(r"[A-Za-z0-9_-]+")


def recipe_text(name: str, overrides: Sequence[str] = (), *, describe: bool = False) -> str:
    """Every value of a recipe; each that is not a default has the remark where it is from.

    What it says is a recipe again, of the same values.
    """
    recipe = load_recipe(name, overrides)
    changed: dict[str, Any] = {}
    for override in overrides:
        changed = merge(changed, parse_override(override))
    said = {RECIPE: read_toml(recipe_path(name)), OVERRIDE: changed}
    lines = [
        f"# {RECIPE}: configs/{name}.toml says so, or a file that it extends. {OVERRIDE}: the command line does.",
        "# All else are defaults.",
        f"description = {_value(recipe.description)}",
    ]
    for section, settings in recipe.sections.items():
        lines += _table((section,), settings, said, describe)
    return "\n".join(lines)


def _table(at: tuple[str, ...], settings: BaseModel, said: Mapping[str, Any], describe: bool) -> Iterator[str]:
    """The lines of a table: its values, then its tables."""
    yield ""
    if describe and settings.__doc__:
        yield from _comment(settings.__doc__)
    yield f"[{'.'.join(at)}]"
    tables = {}
    for name, field in type(settings).model_fields.items():
        value = getattr(settings, name)
        if isinstance(settings, EnvironmentSettings) and name == "args":
            value = ENVIRONMENTS[settings.name].Settings.model_validate(value)
        if isinstance(value, BaseModel):
            tables[name] = value
            continue
        if describe and field.description:
            yield from _comment(field.description)
        known = settings.model_dump(mode="json", include={name})[name]
        source = next((each for each in (OVERRIDE, RECIPE) if _holds(said[each], (*at, name))), "")
        line = f"# {name}: none" if value is None else f"{name} = {_value(known)}"
        yield f"{line}  # {source}" if source else line
    for name, value in tables.items():
        yield from _table((*at, name), value, said, describe)


def _comment(text: str) -> Iterator[str]:
    for line in text.strip().splitlines():
        yield f"# {line.strip()}".rstrip()


def _holds(values: Any, at: Sequence[str]) -> bool:
    for key in at:
        if not isinstance(values, Mapping) or key not in values:
            return False
        values = values[key]
    return True


def _value(value: Any) -> str:
    """A value on one line. TOML has no null: what is none in a table is left out."""
    if isinstance(value, Mapping):
        parts = [f"{_key(key)} = {_value(part)}" for key, part in value.items() if part is not None]
        return "{ " + ", ".join(parts) + " }" if parts else "{}"
    if isinstance(value, list):
        return f"[{', '.join(map(_value, value))}]"
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _key(key: str) -> str:
    return key if BARE.fullmatch(key) else json.dumps(key, ensure_ascii=False)
