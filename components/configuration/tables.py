"""Reading of TOML files that extend one another, and of KEY=VALUE overrides, as nested tables."""

from __future__ import annotations

import glob
import os
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from datetime import date, time
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

from pydantic import model_validator

from armature.components.configuration.problems import SHORT, explained
from armature.components.contracts.errors import ConfigurationError, DataError
from armature.components.contracts.files import read_bytes
from armature.components.contracts.installation import CONFIGS
from armature.components.contracts.settings import Settings
from armature.components.machine.registry import suggestion

LARGEST_FILE, DEEPEST = 2**22, 32
"""Limits on the bytes of a TOML file and on the parts of an override's dotted key."""
SUFFIX = ".toml"
INSTALLED = re.compile(r"[\w-]+/[\w-]+")
"""Pattern of the name of an installed recipe, `<flow>/<deployment>`."""
TAKEN_AWAY = object()
"""Value of an override that removes a setting or a section."""


class Written:
    """A number that an override gives, together with the text of the override.

    Settings that are strings use the text: the digest 12e456 is also a valid float.
    """

    text: str


class _Int(Written, int): ...


class _Float(Written, float): ...


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Return `base` updated by `over`, table by table.

    Lists and scalars are replaced as a whole, and keys whose value is `TAKEN_AWAY` are removed.

    >>> merge({"trainer": {"max_steps": 40, "seed": 1}}, {"trainer": {"max_steps": 2}})
    {'trainer': {'max_steps': 2, 'seed': 1}}
    """
    merged = dict(base)
    for key, value in over.items():
        if value is TAKEN_AWAY:
            merged.pop(key, None)
            continue
        old = merged.get(key)
        merged[key] = merge(old if isinstance(old, Mapping) else {}, value) if isinstance(value, Mapping) else value
    return merged


def read_toml(path: Path, seen: tuple[Path, ...] = ()) -> dict[str, Any]:
    """Return the values of a TOML file, merged over the values of the files that it extends.

    If a file names another environment than the file that it extends, it does not inherit the section `environment`.
    It does not inherit the description and `evaluation.kind_field` either, because both are about the environment.

    Raises:
        ConfigurationError: a file is missing, is not TOML, extends itself, or omits a key that it does not inherit.
    """
    path = Path(os.path.abspath(path))  # noqa: PTH100 (resolve would fail at a link to itself)
    if path in seen:
        chain = " -> ".join(each.name for each in (*seen, path))
        raise ConfigurationError(
            f"configurations extend each other in a circle: {chain}", code="circular_extends", where=str(path)
        )
    values = _parse(path)
    if "extends" not in values:
        return values
    with explained(Extends, str(path), "extends", str(Extends.__doc__)):
        base = Extends.model_validate(values.pop("extends"))
    extended = CONFIGS / f"{base.file}{SUFFIX}" if INSTALLED.fullmatch(base.file) else path.parent / base.file
    if not os.path.exists(extended):  # noqa: PTH110 (a name may be too long, which Path reports)
        raise _extends_nothing(base.file, extended, path, "flow" in values)
    inherited = read_toml(extended, (*seen, path))
    for name in base.sections or ():
        _refuse_not_inherited(name, list(inherited), f"{path}, extends.sections")
    chosen = {key: value for key, value in inherited.items() if base.sections is None or key in base.sections}
    for name in base.without:
        chosen = _without_inherited(chosen, name, f"{path}, extends.without")
    return merge(_without_other_environment(chosen, values), values)


def _extends_nothing(name: str, extended: Path, path: Path, has_flow: bool) -> ConfigurationError:
    """Return the error for a recipe file at `path` that extends `name`, whose file would be `extended`.

    In a copy of an installed recipe `name` is beside the original.
    """
    what = f"there is no {SHORT.repr(name)} to extend"
    beside = glob.glob(f"*{SUFFIX}", root_dir=extended.parent)  # noqa: PTH207 (Path fails at a long name)
    copied = [each / name for each in CONFIGS.glob("*/") if os.path.exists(each / name)]  # noqa: PTH110
    if copied:
        what = f"there is no {name!r} beside this copy of an installed recipe"
        installed = copied[0].resolve().relative_to(CONFIGS).with_suffix("").as_posix()
        remedy = f'write extends = "{installed}"' + ', and the flow: flow = "train-vlm"' * (not has_flow)
    elif not name.endswith(SUFFIX):
        remedy = closest(name, installed_names(CONFIGS))
    else:
        remedy = suggestion(extended.name, beside) if beside else "correct the path, which begins at this file's folder"
    return ConfigurationError(what, code="recipe_file_missing", where=f"{path}, extends", remedy=remedy)


def installed_names(configs: Path) -> list[str]:
    """Return the names `<flow>/<deployment>` of the recipes in the folder `configs`, sorted.

    Folders and files that begin with an underscore are bases for other recipes and are not listed.
    """
    names = [f"{path.parent.name}/{path.stem}" for path in sorted(configs.glob(f"*/*{SUFFIX}"))]
    return [name for name in names if not name.startswith("_") and "/_" not in name]


def closest(name: str, recipes: Sequence[str]) -> str:
    """Return the remedy for an unknown name of a recipe: the three recipes whose whole or last name is nearest.

    >>> closest("colrs", ["train-vlm/colors", "evaluate/sweep", "train-vla/tiny", "train-vlm/recall"])
    "did you mean 'train-vlm/colors', 'evaluate/sweep' or 'train-vlm/recall'? `armature list` shows all recipes"
    """

    def likeness(recipe: str) -> float:
        pairs = (recipe, name), (recipe.rpartition("/")[2], name.rpartition("/")[2])
        return max(SequenceMatcher(None, *pair).ratio() for pair in pairs)

    *others, last = map(repr, sorted(recipes, key=likeness, reverse=True)[:3])
    return f"did you mean {', '.join(others)} or {last}? `armature list` shows all recipes"


def _without_inherited(values: Mapping[str, Any], name: str, where: str) -> dict[str, Any]:
    """Return the inherited `values` without the section or setting whose dotted key is `name`.

    Raises:
        ConfigurationError: there is no such key; the nearest one is suggested.
    """
    _refuse_not_inherited(name, list(_dotted_keys(values)), where)
    return merge(values, parse_override(f"{name}="))


def _refuse_not_inherited(name: str, keys: Sequence[str], where: str) -> None:
    if name not in keys:
        remedy = suggestion(name, [key for key in keys if key.count(".") == name.count(".")])
        raise ConfigurationError(f"{name!r} is not inherited", code="not_inherited", where=where, remedy=remedy)


def _dotted_keys(values: Mapping[str, Any]) -> Iterator[str]:
    """Yield the dotted key of every table and value in nested tables, for example "policy" and "policy.tiny"."""
    for key, value in values.items():
        yield key
        if isinstance(value, Mapping):
            yield from (f"{key}.{inner}" for inner in _dotted_keys(value))


def _without_other_environment(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a base recipe that still apply if the values `over` name another environment.

    In that case the description, the section `environment` and the setting `evaluation.kind_field` are removed.
    Otherwise all values of `base` are returned.
    """
    before, after = (_table(values, "environment").get("name") for values in (base, over))
    if before is None or after is None or after == before:
        return dict(base)
    evaluation = {key: value for key, value in _table(base, "evaluation").items() if key != "kind_field"}
    rest = {key: value for key, value in base.items() if key not in ("environment", "description")}
    return rest | {"evaluation": evaluation} if evaluation else rest


def _table(values: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return the table called `name`, or an empty table if `values` has no such table."""
    table = values.get(name)
    return table if isinstance(table, Mapping) else {}


class Extends(Settings):
    """Write extends = "base.toml", or extends = {file = "base.toml", sections = ["model"]}.

    In place of a file, also an installed recipe: extends = "train-vlm/colors". Sections and settings that are not
    wanted: extends = {file = "train-vla/tiny", without = ["evaluation", "policy.tiny.seed"]}.
    """

    file: str
    sections: tuple[str, ...] | None = None
    without: tuple[str, ...] = ()

    @model_validator(mode="before")
    @classmethod
    def _from_a_name(cls, value: Any) -> Any:
        return {"file": value} if isinstance(value, str) else value


def _parse(path: Path) -> dict[str, Any]:
    """Return the values of one TOML file, without the values of the file that it extends."""
    try:
        if not path.exists():
            files = [each.name for each in path.parent.glob(f"*{SUFFIX}")]
            remedy = suggestion(path.name, files) if files else "armature list shows what there is"
            raise ConfigurationError(f"TOML config not found: {path}", code="recipe_file_missing", remedy=remedy)
        if not path.is_file():
            raise ConfigurationError("not a file", code="recipe_file_unreadable", where=str(path))
        return tomllib.loads(read_bytes(path, LARGEST_FILE).decode())
    except DataError as error:
        raise ConfigurationError(error.what, code=error.code, where=error.where, remedy=error.remedy) from error
    except UnicodeDecodeError as error:
        raise ConfigurationError(
            f"not valid TOML, which is UTF-8: {error}", code="invalid_toml", where=str(path)
        ) from error
    except RecursionError as error:
        raise ConfigurationError("not valid TOML: too deeply nested", code="invalid_toml", where=str(path)) from error
    except ValueError as error:
        raise ConfigurationError(f"not valid TOML: {error}", code="invalid_toml", where=str(path)) from error
    except OSError as error:
        raise ConfigurationError(
            f"the file cannot be read: {error.strerror}", code="recipe_file_unreadable", where=str(path)
        ) from error


def parse_override(text: str) -> dict[str, Any]:
    """Parse `a.b=value` to nested tables. The value is TOML, or a bare word for a string; an empty value removes it.

    >>> parse_override("trainer.max_steps=20")
    {'trainer': {'max_steps': 20}}


    Raises:
        ConfigurationError: the text has another form.
    """
    key, separator, value = text.partition("=")
    parts = [part.strip() for part in key.split(".")]
    broken = any(character == "\0" or "\ud800" <= character <= "\udfff" for character in text)
    if not separator or not all(parts) or len(parts) > DEEPEST or broken:
        raise ConfigurationError(
            f"invalid override: {SHORT.repr(text)}", code="invalid_override", remedy="write --set section.key=value"
        )
    parsed: Any = TAKEN_AWAY
    if value.strip():
        try:
            parsed, *more = tomllib.loads(f"value = {value}").values()
            if more:
                raise ConfigurationError(
                    f"not one override: {SHORT.repr(text)}", code="invalid_override", remedy="write a --set for each"
                )
        except tomllib.TOMLDecodeError:
            parsed = value
        except (ValueError, RecursionError) as error:  # a number of thousands of digits, or too deeply nested
            raise ConfigurationError(
                f"invalid override: {SHORT.repr(text)}: {error}", code="invalid_override", where=key
            ) from error
    if isinstance(parsed, date | time):  # 2024-05-01 is more often the name of a folder than a date
        parsed = value.strip()
    if type(parsed) in (int, float):
        parsed = _Int(parsed) if isinstance(parsed, int) else _Float(parsed)
        parsed.text = value.strip()
    for part in reversed(parts):
        parsed = {part: parsed}
    return dict(parsed)
