"""Suites, their tasks in LIBERO's order, and the facts that every task shares."""

from __future__ import annotations

import hashlib
import io
import json
import pickle
import re
import zipfile
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from functools import cache
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import numpy as np
from numpy._core.multiarray import _reconstruct
from numpy.typing import NDArray

from armature.components.contracts.errors import ConfigurationError, DataError
from armature.components.contracts.files import read_bytes
from armature.components.machine.registry import suggestion
from armature.components.robots.libero.package import package_folder
from armature.components.robots.libero.settings import SimulatorSettings

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


# Which tasks can be made easier: solved as soon as the gripper is near the object that they are about.


def refuse_unreachable(tasks: Iterable[LiberoTask], simulator: SimulatorSettings) -> None:
    """
    Raises:
        ConfigurationError: `reach_distance` is set, and a task is about a drawer, a door or a knob and not an object.
    """
    if simulator.reach_distance is None:
        return
    unable = {task: thing for task in tasks if (thing := _part_of_furniture(task))}
    if unable:
        first, thing = next(iter(unable.items()))
        raise ConfigurationError(
            f"{first.language!r} is about {thing}, which is not an object that the gripper could be near to",
            code="object_missing",
            where=f"simulator.reach_distance; {first.suite}, task {first.index}",
            remedy="leave reach_distance out, or these tasks: "
            + ", ".join(f"{task.suite} {task.index}" for task in unable),
        )


def _part_of_furniture(task: LiberoTask) -> str | None:
    """What the first predicate of the task's goal is about, unless that is an object."""
    text = task.bddl_file.read_text()
    objects, goal = (text.split(f"(:{section}", 1)[1] for section in ("objects", "goal"))
    thing = re.findall(r"[^\s()]+", goal)[2]  # (And (Open thing) ...
    return None if thing in objects.split(")", 1)[0].split() else thing


# Initial states: arrays that LIBERO stores as pickles, read without running what a pickle says.

LARGEST = 64 * 2**20
_PICKLE = "archive/data.pkl"


def _latin(text: str, encoding: str) -> bytes:
    """How pickles of an old protocol hold bytes."""
    if encoding != "latin1":
        raise pickle.UnpicklingError(f"bytes are written as {encoding!r}, not as latin1")
    return text.encode("latin1")


_NEEDED = {
    ("numpy.core.multiarray", "_reconstruct"): _reconstruct,
    ("numpy._core.multiarray", "_reconstruct"): _reconstruct,
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): np.dtype,
    ("_codecs", "encode"): _latin,
}
"""All that a pickled array of numbers refers to."""


def load_initial_states(task: LiberoTask, trusted: Collection[str] = ()) -> NDArray[np.float64]:
    """(states, values): time, positions and velocities as MuJoCo has them, flat.

    Args:
        trusted: SHA-256 of files that are read beside the one that the package came with.

    Raises:
        DataError: the file is missing, unknown, or anything but one array of finite numbers.
    """
    path = task.states_file
    try:
        data = read_bytes(path, LARGEST)
    except OSError as error:
        raise DataError(
            f"the initial states cannot be read: {error}", code="initial_states_unreadable", where=str(path)
        ) from error
    digest = hashlib.sha256(data).hexdigest()
    if digest not in (task.digest, *trusted):
        raise DataError(
            f"initial states with the digest {digest} are not the package's, which have {task.digest}",
            code="unknown_initial_states",
            where=str(path),
            remedy="install hf-libero again, or name the digest in simulator.trusted_initial_states",
        )
    return read_states(data, str(path))


def read_states(data: bytes, where: str) -> NDArray[np.float64]:
    """
    Raises:
        DataError: not a torch archive of one array of finite numbers.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            if archive.getinfo(_PICKLE).file_size > LARGEST:
                raise DataError(
                    f"initial states of more than {LARGEST} bytes", code="invalid_initial_states", where=where
                )
            states = _ArraysOnly(io.BytesIO(archive.read(_PICKLE))).load()
    except (zipfile.BadZipFile, KeyError, pickle.UnpicklingError, EOFError, ValueError, TypeError) as error:
        raise DataError(
            f"not an array of initial states: {error}", code="invalid_initial_states", where=where
        ) from error
    if not isinstance(states, np.ndarray) or states.dtype != np.float64 or states.ndim != 2:
        raise DataError(
            "initial states are not one array (states, values) of float64", code="invalid_initial_states", where=where
        )
    if not np.isfinite(states).all():
        raise DataError(
            f"initial state {np.argwhere(~np.isfinite(states))[0][0]} is not finite",
            code="invalid_initial_states",
            where=where,
        )
    return states


class _ArraysOnly(pickle.Unpickler):
    """Refuses every name but those of an array."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _NEEDED:
            raise pickle.UnpicklingError(f"it refers to {module}.{name}, which no array of numbers needs")
        return _NEEDED[module, name]

    def persistent_load(self, pid: object) -> Any:
        raise pickle.UnpicklingError("it refers to tensors outside it")
