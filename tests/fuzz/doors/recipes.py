"""Recipes: files of TOML, overrides, and the values that a form sends."""

from __future__ import annotations

import math
import random
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from armature.components.configuration import (
    CONFIGS,
    build_recipe,
    load_recipe,
    recipe_from_file,
    recipe_names,
    recipe_path,
)
from tests.fuzz.doors import Attempt, expect
from tests.fuzz.mutate import HOSTILE, damaged_bytes, damaged_document


def leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, dict | list | tuple):
        for each in value.values() if isinstance(value, dict) else value:
            yield from leaves(each)
    else:
        yield value


def check(dump: dict[str, Any]) -> bool:
    numbers = [value for value in leaves(dump) if isinstance(value, float)]
    expect(all(math.isfinite(number) for number in numbers), "a setting is not finite")
    return True


def contains(dump: Any, value: Any) -> bool:
    """Return True if the recipe's document `dump` has a leaf with the type and the value of `value`. So True and "1" do
    not equal 1, but a written 1 may be read as 1.0."""
    return any(type(leaf) is type(value) and leaf == value for leaf in leaves(dump)) or (
        type(value) is int and any(type(leaf) is float and leaf == float(value) for leaf in leaves(dump))
    )


@contextmanager
def door(folder: Path) -> Iterator[Attempt]:
    names = recipe_names()
    shutil.copytree(CONFIGS, folder / "configs")

    def from_file(rng: random.Random) -> bool:
        name = rng.choice(names)
        file = folder / "configs" / f"{name}.toml"
        file.write_bytes(damaged_bytes(recipe_path(name).read_bytes(), rng))
        return check(recipe_from_file(file, name).dump())

    def from_form(rng: random.Random) -> bool:
        name = rng.choice(names)
        dump = load_recipe(name).dump()
        values = damaged_document(dump, rng)
        if not isinstance(values, dict):
            return False
        return check(build_recipe(name, values, where="form").dump())

    def from_override(rng: random.Random) -> bool:
        name = rng.choice(names)
        section, settings = rng.choice([item for item in load_recipe(name).dump().items() if isinstance(item[1], dict)])
        key = rng.choice([*settings, "unknown", ""])
        value = rng.choice([each for each in HOSTILE if isinstance(each, bool | int | float)])
        text = str(value).lower() if isinstance(value, bool) else repr(value)
        dump = load_recipe(name, [f"{section}.{key}={text}"]).dump()
        as_written = not isinstance(value, bool) and contains(dump[section], text)  # where a string is asked for
        expect(as_written or contains(dump[section], value), f"{section}.{key}={text} became another value")
        return check(dump)

    yield lambda rng: rng.choice((from_file, from_form, from_override))(rng)
