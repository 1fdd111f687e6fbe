"""Suites, their tasks in LIBERO's order, and the facts that every task shares."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

from armature.components.contracts.errors import ConfigurationError
from armature.components.environments.libero.package import package_folder
from armature.components.registry import suggestion

ACTION_NAMES = ("x", "y", "z", "roll", "pitch", "yaw", "gripper")
"""Of an action, each from -1 to 1: 0.05 m and 0.5 rad per step; gripper -1 opens and 1 closes."""

STATE_NAMES = ("x", "y", "z", "axis_angle1", "axis_angle2", "axis_angle3", "gripper1", "gripper2")

MAX_STEPS = {"libero_spatial": 280, "libero_object": 280, "libero_goal": 300, "libero_10": 520, "libero_90": 400}
"""Actions after which an episode has failed, those of the wait not counted."""

KNOWN_STATES = Path(__file__).with_name("known_initial_states.json")


@dataclass(frozen=True)
class LiberoTask:
    """Task `index` of a suite. `initial_states` is how many its file has, `digest` that file's SHA-256."""

    suite: str
    index: int
    name: str
    language: str
    initial_states: int
    digest: str

    @property
    def bddl_file(self) -> Path:
        return package_folder() / "bddl_files" / self.suite / f"{self.name}.bddl"

    @property
    def states_file(self) -> Path:
        return package_folder() / "init_files" / self.suite / f"{self.name}.pruned_init"


@cache
def suite_tasks(suite: str) -> tuple[LiberoTask, ...]:
    """
    Raises:
        ConfigurationError: no such suite, or LIBERO is not installed.
    """
    names = _task_names()
    if suite not in MAX_STEPS:
        raise ConfigurationError(
            f"no LIBERO suite is called {suite!r}", code="unknown_suite", remedy=suggestion(suite, MAX_STEPS)
        )
    known = json.loads(KNOWN_STATES.read_text())
    return tuple(
        LiberoTask(suite, i, name, words(name), *known[f"{suite}/{name}"]) for i, name in enumerate(names[suite])
    )


def words(name: str) -> str:
    """A task's name as an instruction; long suites put the scene in front of it."""
    if name[0].isupper():
        scene = next(part for part in name.split("_") if part.startswith("SCENE"))
        name = name.split(f"{scene}_", 1)[1]
    return name.replace("_", " ")


@cache
def _task_names() -> dict[str, list[str]]:
    """The package's own list. Its file is run alone: the package around it imports torch and asks on stdin."""
    path = package_folder() / "benchmark" / "libero_suite_task_map.py"
    spec = spec_from_file_location("libero_suite_task_map", path)
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    names: dict[str, list[str]] = module.libero_task_map
    return names
