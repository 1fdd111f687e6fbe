"""Error messages for invalid sections of a recipe, with the keys as they are written in the TOML file."""

from __future__ import annotations

import reprlib
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from armature.components.contracts.errors import ConfigurationError, InvalidName
from armature.components.contracts.machine import MachineLimits, MachineTrainer
from armature.components.contracts.secrets import PLAIN_SECRET
from armature.components.contracts.settings import InvalidTable
from armature.components.machine.registry import nearest, suggestion

SHORT = reprlib.Repr()
SHORT.maxstring = SHORT.maxother = SHORT.maxlong = 200
"""Formatter that shortens values for error messages."""

IN_TOML = {
    **dict.fromkeys(("model_type", "model_attributes_type", "dict_type"), "Input should be a table, {key = value}"),
    **dict.fromkeys(("tuple_type", "list_type"), "Input should be a list, [value]"),
}
"""Messages about types in words of TOML, by pydantic's names of the problems."""
NEW_NAMES = {
    "panel_tasks": "heldout_tasks",
    "panel_episodes": "heldout_episodes",
    "machine.servers": "machine.servers.count",
    "machine.endpoints": "machine.servers.endpoints",
    "machine.server_gpus": "machine.servers.gpus",
    "machine.server_python": "machine.servers.python",
    "machine.server_arguments": "machine.servers.arguments",
    "machine.server_environment": "machine.servers.environment",
    "machine.weight_transfer": "machine.servers.weight_transfer",
    "machine.sync_tolerance": "machine.servers.sync_tolerance",
    "machine.loader_workers": "machine.trainer.loader_workers",
    "machine.environment_processes": "machine.workers.environments",
    "machine.rollout_workers": "machine.workers.rollouts",
    "machine.statistics_workers": "machine.workers.statistics",
    **{f"machine.trainer_{name}": f"machine.trainer.{name}" for name in MachineTrainer.model_fields},
    **{f"machine.{name}": f"machine.limits.{name}" for name in MachineLimits.model_fields},
}
"""New names of renamed settings, by their old names. An old name is a whole dotted key, or only its last part."""


def _tables(error: ValidationError) -> Iterator[tuple[tuple[str | int, ...], type[BaseModel]]]:
    """Yield the location and the settings class of each table that does not fit the class that another key selects."""
    for each in error.errors():
        if isinstance(cause := each.get("ctx", {}).get("error"), InvalidTable):
            yield each["loc"], cause.model


def code_of(error: ValidationError) -> str:
    """Return a code for a validation error: the type of its first problem, or the code of the error that caused it.

    The type is a type of pydantic, or the type of a PydanticCustomError.
    """
    first = causes(error)[0]
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, InvalidTable):
        return code_of(cause.error)
    return cause.code if isinstance(cause, InvalidName) else first["type"]


def causes(error: ValidationError, outside: Collection[str] = ()) -> list[ErrorDetails]:
    """Return the problems of a validation error that are not consequences of others.

    A list is only too short for pydantic if it leaves out invalid items, and a key is missing if it is misspelled, or
    if it is one of `outside`, the unknown keys of the table around the validated one.
    """
    unknown = _unknown_keys(error)

    def follows(each: ErrorDetails) -> bool:
        beside, cause = unknown[each["loc"][:-1]], each.get("ctx", {}).get("error")
        if isinstance(cause, InvalidTable):
            return not causes(cause.error, beside)
        if each["type"] == "too_short":
            return len(each["input"]) >= each["ctx"]["min_length"]
        if each["type"] != "missing":
            return False
        key = str(each["loc"][-1])
        return any(nearest(name, [key]) for name in beside) or (len(each["loc"]) == 1 and key in outside)

    return [each for each in error.errors() if not follows(each)]


def _unknown_keys(error: ValidationError) -> Mapping[tuple[str | int, ...], list[str]]:
    """Return the unknown keys of each table by the location of the table."""
    unknown: dict[tuple[str | int, ...], list[str]] = defaultdict(list)
    for each in error.errors():
        if each["type"] == "extra_forbidden":
            unknown[each["loc"][:-1]].append(str(each["loc"][-1]))
    return unknown


@contextmanager
def explained(model: type[BaseModel], where: str, section: str = "", remedy: str = "") -> Iterator[None]:
    """Turn a ValidationError of the block into a ConfigurationError, whose text `explain` makes.

    Args:
        model, section: see `explain`.
        where, remedy: parts of the error.
    """
    try:
        yield
    except ValidationError as error:
        message, code = explain(error, section, model), code_of(error)
        # Pydantic's own text says the same in words of Python, and would be printed above this one.
        raise ConfigurationError(message, code=code, where=where, remedy=remedy) from None


def explain(error: ValidationError, section: str, model: type[BaseModel], outside: Collection[str] = ()) -> str:
    """Return a message for a validation error, with one line per problem.

    A line names the dotted key and the invalid value. For an unknown key, it suggests the nearest known key.

    Args:
        section: name of the section; "" for a whole recipe, whose keys begin with a section.
        outside: see `causes`.
    """
    lines, begin, unknown = [], [section] if section else [], _unknown_keys(error)
    tables = {(*loc[:-1], name): loc[-1] for loc, table in _tables(error) if loc for name in table.model_fields}
    for problem in causes(error, outside):
        cause = problem.get("ctx", {}).get("error")
        if isinstance(cause, InvalidTable):
            name, beside = ".".join([*begin, *map(str, problem["loc"])]), unknown[problem["loc"][:-1]]
            lines.append(explain(cause.error, name, cause.model, beside))
            continue
        path, variant, fields = place(model, problem["loc"])
        key = ".".join([*begin, *path])
        if isinstance(cause, InvalidName):  # a name is the key `name` of a table, and may have arguments in `args`
            name = f"{key.removesuffix('args').removesuffix('.')}.name".removeprefix(".")
            lines.append("; ".join(filter(None, (f"{name}: {cause.what}", cause.where, cause.remedy))))
            continue
        message = IN_TOML.get(problem["type"]) or problem["msg"].removeprefix("Value error, ")
        line = f"{key}: {message}" if key else message
        new = NEW_NAMES.get(key) or NEW_NAMES.get(path[-1]) if path else None
        if new and problem["type"] in ("extra_forbidden", "model_type"):
            line = f"{key} is now called {new!r}"
        elif problem["type"] == "extra_forbidden" and (inner := tables.get(problem["loc"])):
            line = f"{key} is not a setting; did you mean {'.'.join([*begin, *path[:-1], str(inner), path[-1]])!r}?"
        elif problem["type"] == "extra_forbidden":
            remedy = suggestion(path[-1], fields) if section else meant(path, fields, model)
            line = f"{key} is not a setting{f' of {variant!r}' if variant else ''}; {remedy}"
        elif problem["type"] == "union_tag_not_found":
            discriminator = problem["ctx"]["discriminator"].strip("'")
            line = f"{key}.{discriminator}: Field required"
        elif (
            key
            and problem["type"] not in ("missing", PLAIN_SECRET)
            and (problem["type"] in IN_TOML or not isinstance(problem["input"], dict))
        ):
            line += f" (given {SHORT.repr(problem['input'])})"
        lines.append(line)
    return "\n".join(lines)


def meant(path: Sequence[str], fields: Iterable[str], recipe: type[BaseModel]) -> str:
    """Return the remedy for an unknown key at `path`: the nearest of `fields`, the keys of its own table. If none is
    near, it is a key of the same name in another table."""
    key, name = ".".join(path), path[-1]
    remedy = suggestion(name, fields)
    elsewhere = {each for each in _keys(recipe) if each != key and each.rpartition(".")[2] == name}
    if remedy.startswith("known") and elsewhere:
        nearest = sorted(elsewhere, key=lambda each: (not each.startswith(f"{path[0]}."), len(each), each))
        return f"did you mean {' or '.join(map(repr, nearest[:3]))}?"
    return remedy


def _keys(model: type[BaseModel], above: tuple[type[BaseModel], ...] = ()) -> Iterator[str]:
    """Yield the dotted keys of all settings below `model`."""
    for name, field in model.model_fields.items():
        yield name
        for inner in settings_in(field.annotation):
            if inner not in above:
                yield from (f"{name}.{key}" for key in _keys(inner, (*above, inner)))


def place(model: type[BaseModel], location: Sequence[str | int]) -> tuple[list[str], str, Iterable[str]]:
    """Return where in a recipe a problem of a validation error is.

    `location` is the location that pydantic reports, which also contains the tags of union variants. Returned are the
    keys that lead to the value, without these tags; the tag of the innermost variant that contains the value, or "";
    and the valid keys of the table that contains the value.
    """
    *parents, last = location or ("",)
    path, variant, classes = [], "", [model]
    for part in parents:
        if len(classes) > 1 and (chosen := [each for each in classes if part in _tags(each)]):
            variant, classes = str(part), chosen
            continue
        path.append(str(part))
        if len(classes) == 1 and part in classes[0].model_fields:
            variant, classes = "", list(settings_in(classes[0].model_fields[str(part)].annotation))
    fields = classes[0].model_fields if len(classes) == 1 else ()
    return [*path, *([str(last)] if location else [])], variant, fields


def _tags(model: type[BaseModel]) -> set[Any]:
    """Return all values that the Literal fields of a union's variant allow. One of these values is its tag."""
    literals = [field.annotation for field in model.model_fields.values() if get_origin(field.annotation) is Literal]
    return {value for each in literals for value in get_args(each)}


def settings_in(annotation: Any) -> Iterator[type[BaseModel]]:
    """Yield the settings classes that a type contains, for example as members of a union or as items of a list."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in get_args(annotation):
        yield from settings_in(part)
