"""Files of the installed package alfworld: its PDDL domain, grammar, tables of objects and layouts of scenes.

The files are read without importing alfworld, whose modules create folders in the user's home when imported.
"""

from __future__ import annotations

import hashlib
import re
from collections import defaultdict
from functools import cache
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

from armature.components.contracts.errors import ConfigurationError
from armature.components.contracts.installation import install_command

# --- Names of things, such as `apple 1` and `fridge 1`, which the text game and AI2-THOR share ---

_DECLARED = re.compile(r"([^\s()]+) - (?:object|receptacle)\b")
_ESCAPED = {"_bar_": "|", "_minus_": "-", "_plus_": "+", "_dot_": ".", "_comma_": ","}


def kind_of(object_id: str) -> str:
    """Return the kind of an object by its id: `fridge` for Fridge|..., and `sinkbasin` for Sink|...|SinkBasin."""
    kind = object_id.partition("|")[0].lower()
    return kind + "basin" if "basin" in object_id.lower() and not kind.endswith("basin") else kind


def names_of(problem: str) -> dict[str, str]:
    """Return the name of each object and receptacle in a PDDL problem, by its id in lower case.

    Numbers are those that the text engine gives: within a kind, they fall with the alphabetical order of the PDDL
    names, so that the first id has the highest number.
    """
    declared = problem.partition("(:objects")[2].partition("(:init")[0].lower()
    kinds: dict[str, list[str]] = defaultdict(list)
    for name in sorted(set(_DECLARED.findall(declared))):
        object_id = name
        for written, character in _ESCAPED.items():
            object_id = object_id.replace(written, character)
        kinds[kind_of(object_id)].append(object_id)
    return {
        object_id: f"{kind} {len(ids) - position}"
        for kind, ids in kinds.items()
        for position, object_id in enumerate(ids)
    }


# --- Files of the package ---

DIGESTS = {
    "data/alfred.pddl": "f1473041ed01da514de1f87adfd7ef0804862361f83ccf63c75e43633b0eb280",
    "data/alfred.twl2": "c5b22f0f73309a7fd7c8e5b71de42ad4803b60766ab4a51cc2feb34162be036b",
}
"""SHA-256 of the files of alfworld 0.4.2 that are executed: the engine evaluates {...} in a grammar as Python."""

GOAL = "UNKNOWN GOAL"
"""Placeholder of the goal sentence in the grammar."""


@cache
def folder() -> Path:
    """Return the folder of the package alfworld.

    Raises:
        ConfigurationError: alfworld or its text engine is not installed.
    """
    for package in ("alfworld", "textworld", "fast_downward"):
        spec = find_spec(package)
        if spec is None or spec.origin is None:
            raise ConfigurationError(
                f"ALFWorld needs the package {package}", code="package_missing", remedy=install_command("alfworld")
            )
        if package == "alfworld":
            location = Path(spec.origin).parent
    return location


@cache
def _checked(name: str) -> str:
    path = folder() / name
    content = path.read_bytes()
    digest = hashlib.sha256(content).hexdigest()
    if digest != DIGESTS[name]:
        raise ConfigurationError(
            f"the installed alfworld's {path.name} has the SHA-256 {digest}, expected {DIGESTS[name]}",
            code="alfworld_version_unsupported",
            where=str(path),
            remedy="pip install alfworld==0.4.2; other versions are refused, because a grammar is code",
        )
    return content.decode()


def domain() -> str:
    """Return ALFRED's PDDL domain."""
    return _checked("data/alfred.pddl")


def grammar() -> str:
    """Return the grammar that turns facts into text and commands. `GOAL` in it stands for a game's goal sentence."""
    return _checked("data/alfred.twl2")


@cache
def constants() -> ModuleType:
    """Return the module alfworld.gen.constants: tables of objects and receptacles and of the actions on them."""
    return _module("constants")


@cache
def goals() -> dict[str, dict[str, object]]:
    """Return alfworld.gen.goal_library.gdict: for each task type, the goal in PDDL and as sentences."""
    library: dict[str, dict[str, object]] = _module("goal_library").gdict
    return library


def _module(name: str) -> ModuleType:
    spec = spec_from_file_location(f"alfworld_{name}", folder() / f"gen/{name}.py")
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
