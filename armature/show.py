"""`armature show`: print a recipe's values, or the tree of everything that a result was made from."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pydantic import BaseModel

from armature.components.configuration import SUFFIX, load_recipe, merge, parse_override, read_toml, recipe_path
from armature.components.contracts.errors import ConfigurationError
from armature.components.environments import ENVIRONMENTS
from armature.components.environments.settings import EnvironmentSettings
from armature.components.machine.project import project

RECIPE, OVERRIDE = "recipe", "--set"
"""Sources of values that are not defaults, as comments name them: the recipe's files and the command line."""
BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")


def recipe_text(name: str, overrides: Sequence[str] = (), *, describe: bool = False, changed_only: bool = False) -> str:
    """Return a recipe with all its values as TOML. Loading this text gives the same values.

    A comment marks each value that is not a default and says where it comes from: the recipe or the command line.

    Args:
        name: name or file of the recipe.
        overrides: values to change, as for `--set`.
        describe: add the description of each setting as a comment.
        changed_only: leave out the defaults.
    """
    recipe = load_recipe(name, overrides)
    changed: dict[str, Any] = {}
    for override in overrides:
        changed = merge(changed, parse_override(override))
    sources = {RECIPE: read_toml(recipe_path(name)), OVERRIDE: changed}
    file = name if name.endswith(SUFFIX) else f"configs/{name}{SUFFIX}"
    legend = [
        f"# {RECIPE}: set in {file} or in a file that it extends. {OVERRIDE}: set on the command line.",
        "# All other values are defaults.",
    ]
    lines = [
        *([f"# From {file}; `armature show` on this file prints all values."] if changed_only else legend),
        f"flow = {_value(recipe.kind)}",
        f"description = {_value(recipe.description)}",
        *([f"gpu_gib = {recipe.gpu_gib}"] if recipe.gpu_gib else []),
    ]
    with project(recipe.folder):
        for section, settings in recipe.sections.items():
            lines += _table((section,), settings, sources, describe, changed_only)
    return "\n".join(lines)


def toml_text(values: Mapping[str, Any], at: tuple[str, ...] = ()) -> str:
    """Return nested values as TOML, with plain values before tables.

    Keys with the value None are left out, because TOML has no null. `at` is the path of keys to these values within the
    whole document.
    """
    lines = [f"{_key(key)} = {_value(part)}" for key, part in values.items() if not isinstance(part, Mapping | None)]
    tables = {key: part for key, part in values.items() if isinstance(part, Mapping)}
    head = [f"\n[{'.'.join(map(_key, at))}]"] if at and (lines or not tables) else []
    return "\n".join([*head, *lines, *(toml_text(part, (*at, key)) for key, part in tables.items())])


def _table(
    at: tuple[str, ...], settings: BaseModel, sources: Mapping[str, Any], describe: bool, changed_only: bool
) -> Iterator[str]:
    """Yield the lines of a TOML table: its heading, its plain values, and then the tables in it.

    `at` is the path of keys to the table. `sources` has the values that the recipe and the command line set.
    """
    if changed_only and not any(_holds(values, at) for values in sources.values()):
        return
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
        source = next((each for each in (OVERRIDE, RECIPE) if _holds(sources[each], (*at, name))), "")
        if changed_only and (not source or value is None):
            continue
        if describe and field.description:
            yield from _comment(field.description)
        plain = settings.model_dump(mode="json", include={name})[name]
        line = f"# {name}: none" if value is None else f"{name} = {_value(plain)}"
        yield f"{line}  # {source}" if source and not changed_only else line
    for name, value in tables.items():
        yield from _table((*at, name), value, sources, describe, changed_only)


def _comment(text: str) -> Iterator[str]:
    """Yield the lines of a text as TOML comments."""
    for line in text.strip().splitlines():
        yield f"# {line.strip()}".rstrip()


def _holds(values: Any, at: Sequence[str]) -> bool:
    """Check whether nested tables have a value at the path of keys `at`."""
    for key in at:
        if not isinstance(values, Mapping) or key not in values:
            return False
        values = values[key]
    return True


def _value(value: Any) -> str:
    """Return a value as TOML on one line. In an inline table, keys with the value None are left out, because TOML has
    no null."""
    if isinstance(value, Mapping):
        parts = [f"{_key(key)} = {_value(part)}" for key, part in value.items() if part is not None]
        return "{ " + ", ".join(parts) + " }" if parts else "{}"
    if isinstance(value, list):
        return f"[{', '.join(map(_value, value))}]"
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _key(key: str) -> str:
    """Return a key as TOML, in quotes if it needs them."""
    return key if BARE_KEY.fullmatch(key) else json.dumps(key, ensure_ascii=False)


SECONDS = 5.0
"""Seconds to wait for MLflow to answer. The time is short, because a person waits for the output."""


def show(what: str | None, overrides: Sequence[str], most: int, *, describe: bool = False, toml: bool = False) -> None:
    """Print a recipe, the tree of everything that a result was made from, or the latest runs.

    Args:
        what: name or file of a recipe, an artifact's digest or an MLflow run; None: the latest runs.
        overrides: values of the recipe to change, as for `--set`.
        most: how many artifacts of a long series of steps to print.
        describe: add the description of each setting of a recipe.
        toml: print a recipe without its defaults.

    Raises:
        ConfigurationError: `toml` is set, and `what` is not a recipe.
    """
    if what is not None and ("/" in what or what.endswith(SUFFIX)):
        print(recipe_text(what, overrides, describe=describe, changed_only=toml))
        return
    if toml:
        raise ConfigurationError(
            "--toml needs a recipe",
            code="not_a_recipe",
            where=f"armature show --toml {what or ''}",
            remedy="armature list",
        )
    from armature.tasks.patience import patience

    with patience(SECONDS):
        if what is None:
            _latest_runs()
        else:
            from armature.tasks.lineage import lineage

            print("\n".join(lineage(_whole_digest(what)).lines(most=most)))


def _whole_digest(what: str) -> str:
    """Return the whole digest of the artifact whose digest begins with `what`.

    If the local store has no such artifact, return `what` unchanged.
    """
    from armature.components.configuration.stages import open_store
    from armature.components.contracts.machine import Machine

    artifact = open_store(Machine()).find_digest(what)
    return artifact.digest if artifact else what


def _latest_runs() -> None:
    """Print id, status and name of the latest 20 flow runs in MLflow."""
    from armature.tasks.mlflow_client import FLOW_RUN_TAG, PARENT_TAG, client

    experiments = [each.experiment_id for each in client().search_experiments()]
    runs = client().search_runs(experiments, max_results=200, order_by=["attributes.start_time DESC"])
    flows = [run for run in runs if FLOW_RUN_TAG in run.data.tags and PARENT_TAG not in run.data.tags]
    for run in flows[:20]:
        print(f"{run.info.run_id}  {run.info.status:<9}  {run.info.run_name}")
    if not flows:
        print("no runs yet; `armature run train-vlm/colors` makes one")
