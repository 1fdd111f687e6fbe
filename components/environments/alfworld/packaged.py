"""What the installed alfworld brings: the domain and grammar that play, its tables, and its scenes' layouts.

Its files are read without importing it: alfworld's own modules make folders in the user's home when imported.
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

# What things are called: `apple 1`, `fridge 1`, and the same name in the text game and in AI2-THOR.

_DECLARED = re.compile(r"([^\s()]+) - (?:object|receptacle)\b")
_ESCAPED = {"_bar_": "|", "_minus_": "-", "_plus_": "+", "_dot_": ".", "_comma_": ","}


def kind_of(object_id: str) -> str:
    """The kind that a name begins with: `fridge`, and `sinkbasin` where the id ends in it."""
    kind = object_id.partition("|")[0].lower()
    return kind + "basin" if "basin" in object_id.lower() and not kind.endswith("basin") else kind


def names_of(problem: str) -> dict[str, str]:
    """The name of each object and receptacle that the PDDL `problem` declares, by its id in lower case.

    The numbers are the text engine's: of one kind, the first id in its alphabetical order (of PDDL names) has the
    highest.
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


DIGESTS = {
    "data/alfred.pddl": "f1473041ed01da514de1f87adfd7ef0804862361f83ccf63c75e43633b0eb280",
    "data/alfred.twl2": "c5b22f0f73309a7fd7c8e5b71de42ad4803b60766ab4a51cc2feb34162be036b",
}
"""SHA-256 of the files of alfworld 0.4.2 that are run: a grammar's {...} is Python that the engine evaluates."""

GOAL = "UNKNOWN GOAL"
"""What stands for the goal sentence in the grammar."""


@cache
def folder() -> Path:
    """The folder of the package alfworld.

    Raises:
        ConfigurationError: it, or the engine that it plays on, is not installed.
    """
    for package in ("alfworld", "textworld", "fast_downward"):
        spec = find_spec(package)
        if spec is None or spec.origin is None:
            raise ConfigurationError(
                f"ALFWorld needs the package {package}", code="package_missing", remedy=install_command("alfworld")
            )
        if package == "alfworld":
            found = Path(spec.origin).parent
    return found


@cache
def _checked(name: str) -> str:
    path = folder() / name
    content = path.read_bytes()
    digest = hashlib.sha256(content).hexdigest()
    if digest != DIGESTS[name]:
        raise ConfigurationError(
            f"the installed alfworld's {path.name} has SHA-256 {digest}, known is {DIGESTS[name]}",
            code="alfworld_version_unsupported",
            where=str(path),
            remedy="pip install alfworld==0.4.2; other versions are not run, as a grammar is code",
        )
    return content.decode()


def domain() -> str:
    """ALFRED's PDDL domain."""
    return _checked("data/alfred.pddl")


def grammar() -> str:
    """The grammar that turns facts into text and commands, with GOAL where a game's goal sentence goes."""
    return _checked("data/alfred.twl2")


@cache
def constants() -> ModuleType:
    """alfworld.gen.constants: which objects and receptacles there are, and what can be done with them."""
    return _module("constants")


@cache
def goals() -> dict[str, dict[str, object]]:
    """alfworld.gen.goal_library.gdict: each task type's goal in PDDL and sentences that say it."""
    library: dict[str, dict[str, object]] = _module("goal_library").gdict
    return library


def _module(name: str) -> ModuleType:
    spec = spec_from_file_location(f"alfworld_{name}", folder() / f"gen/{name}.py")
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
