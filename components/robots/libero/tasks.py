"""LIBERO's suites and their tasks in LIBERO's order, their stored initial states, and names of actions and states."""

from __future__ import annotations

import hashlib
import io
import json
import pickle
import re
import zipfile
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
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
from armature.components.robots.libero.package import COMPACT, package_folder
from armature.components.robots.libero.pro import PRO_SUITES, base_suite, pro_folder, pro_language
from armature.components.robots.libero.settings import SimulatorSettings

ACTION_NAMES = ("x", "y", "z", "roll", "pitch", "yaw", "gripper")
"""Names of an action's numbers, each from -1 to 1: 0.05 m and 0.5 rad per step; gripper -1 opens and 1 closes."""

STATE_NAMES = ("x", "y", "z", "axis_angle1", "axis_angle2", "axis_angle3", "gripper1", "gripper2")

MAX_STEPS = {"libero_spatial": 280, "libero_object": 280, "libero_goal": 300, "libero_10": 520, "libero_90": 400}
"""Number of actions after which an episode has failed, without the waiting steps."""

KNOWN_STATES = Path(__file__).with_name("known_initial_states.json")


@dataclass(frozen=True)
class LiberoTask:
    """Task `index` of a suite. initial_states: number of stored states. digest: SHA-256 of the file of states."""

    suite: str
    index: int
    name: str
    language: str
    initial_states: int
    digest: str

    @property
    def bddl_file(self) -> Path:
        """File that defines the scene and the goal."""
        return self._folder() / "bddl_files" / self.suite / f"{self.name}.bddl"

    @property
    def states_file(self) -> Path:
        """File of the stored initial states."""
        ending = ".npz" if self.suite in PRO_SUITES else ""
        return self._folder() / "init_files" / self.suite / f"{self.name}.pruned_init{ending}"

    @property
    def goal(self) -> list[list[str]]:
        """Goal predicates of the BDDL file: [["on", "akita_black_bowl_1", "plate_1"]]."""
        text = self.bddl_file.read_text().split("(:goal", 1)[1].lower()
        return [predicate.split() for predicate in re.findall(r"\(([^()]+)\)", text)]

    def _folder(self) -> Path:
        return pro_folder() if self.suite in PRO_SUITES else package_folder()


@cache
def suite_tasks(suite: str) -> tuple[LiberoTask, ...]:
    """Return the tasks of a suite, in LIBERO's order.

    Raises:
        ConfigurationError: the suite does not exist, or LIBERO is not installed.
    """
    if suite in PRO_SUITES:
        tasks = suite_tasks(base_suite(suite))
        files = [pro_language(suite, task.name) for task in tasks]
        return tuple(
            replace(task, suite=suite, language=language, digest=digest)
            for task, (language, digest) in zip(tasks, files, strict=True)
        )
    names = _task_names()
    if suite not in MAX_STEPS:
        raise ConfigurationError(
            f"there is no LIBERO suite {suite!r}",
            code="unknown_suite",
            remedy=suggestion(suite, [*MAX_STEPS, *PRO_SUITES]),
        )
    states = json.loads(KNOWN_STATES.read_text())
    return tuple(
        LiberoTask(suite, i, name, words(name), *states[f"{suite}/{name}"]) for i, name in enumerate(names[suite])
    )


def words(name: str) -> str:
    """Return a task's name as an instruction, without the name of the scene that some suites put first.

    Example:
        >>> words("KITCHEN_SCENE3_turn_on_the_stove")
        'turn on the stove'
    """
    if name[0].isupper():
        scene = next(part for part in name.split("_") if part.startswith("SCENE"))
        name = name.split(f"{scene}_", 1)[1]
    return name.replace("_", " ")


@cache
def _task_names() -> dict[str, list[str]]:
    """Return the package's list of names. Only its file is run: importing the package loads torch and asks on stdin."""
    path = package_folder() / "benchmark" / "libero_suite_task_map.py"
    spec = spec_from_file_location("libero_suite_task_map", path)
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    names: dict[str, list[str]] = module.libero_task_map
    return names


# --- Tasks that can be simplified: solved as soon as the gripper is near the task's object ---


def refuse_unreachable(tasks: Iterable[LiberoTask], simulator: SimulatorSettings) -> None:
    """Check that `reach_distance`, if set, can be applied to all tasks.

    Raises:
        ConfigurationError: a task is about a drawer, a door or a knob, which is not an object.
    """
    if simulator.reach_distance is None:
        return
    unable = {task: thing for task in tasks if (thing := _part_of_furniture(task))}
    if unable:
        first, thing = next(iter(unable.items()))
        raise ConfigurationError(
            f"the task {first.language!r} is about {thing}, which is a part of furniture and has no position to reach",
            code="object_missing",
            where=f"simulator.reach_distance; {first.suite}, task {first.index}",
            remedy="leave reach_distance out, or these tasks: "
            + ", ".join(f"{task.suite} {task.index}" for task in unable),
        )


def refuse_missing_shapes(tasks: Iterable[LiberoTask], simulator: SimulatorSettings) -> None:
    """Check that there are compact shapes for everything in the scenes of all tasks, if they are asked for.

    Raises:
        ConfigurationError: a task has an object or furniture without one.
    """
    if simulator.assets != "compact":
        return
    shapes = {path.stem for path in COMPACT.rglob("*")} | {"table", "floor"}
    missing: dict[str, str] = {}
    for task in tasks:
        listed = re.findall(r"\(:(?:fixtures|objects)([^)]*)\)", task.bddl_file.read_text())
        kinds = {kind for section in listed for kind in re.findall(r"-\s+(\S+)", section)}
        if unknown := sorted(kinds - shapes):
            missing.setdefault(task.suite, unknown[0])
    if missing:
        raise ConfigurationError(
            f"there is no compact shape of {', '.join(dict.fromkeys(missing.values()))}",
            code="compact_shape_missing",
            where=f"simulator.assets; {', '.join(missing)}",
            remedy="leave these suites out, or simulator.assets, to use LIBERO's meshes",
        )


def _part_of_furniture(task: LiberoTask) -> str | None:
    """Return the name in the task's first goal predicate if it names a part of furniture, such as a drawer.

    None if the predicate is about an object.
    """
    objects = task.bddl_file.read_text().split("(:objects", 1)[1].split(")", 1)[0]
    thing = task.goal[0][1]
    return None if thing in objects.split() else thing


# --- Initial states, which LIBERO stores as pickled arrays; they are read without executing what a pickle contains ---

LARGEST = 64 * 2**20
_PICKLE = "archive/data.pkl"


def _latin(text: str, encoding: str) -> bytes:
    """Return the bytes that a pickle of an old protocol stores as latin1 text. Replaces `_codecs.encode`."""
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
"""Objects that a pickled array of numbers may refer to, by module and name."""


def load_initial_states(task: LiberoTask, trusted: Collection[str] = ()) -> NDArray[np.float64]:
    """Return the stored initial states of a task, (states, values): MuJoCo's time, positions and velocities.

    Args:
        trusted: SHA-256 digests of files that may be read besides the one the package came with.

    Raises:
        DataError: the file is missing, has an unknown digest, or is not a single array of finite numbers.
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
            f"the initial states have the digest {digest}, the package's file has {task.digest}",
            code="unknown_initial_states",
            where=str(path),
            remedy="reinstall hf-libero, or add the digest to simulator.trusted_initial_states",
        )
    if task.suite in PRO_SUITES:
        with np.load(io.BytesIO(data), allow_pickle=False) as archive:
            states: NDArray[np.float64] = archive["states"]
        return states
    return read_states(data, str(path))


def read_states(data: bytes, where: str) -> NDArray[np.float64]:
    """Return the initial states in the content of a file, (states, values) float64.

    Raises:
        DataError: the content is not a torch archive of a single array of finite numbers.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            if archive.getinfo(_PICKLE).file_size > LARGEST:
                raise DataError(
                    f"the initial states have more than {LARGEST} bytes", code="invalid_initial_states", where=where
                )
            states = _ArraysOnly(io.BytesIO(archive.read(_PICKLE))).load()
    except (zipfile.BadZipFile, KeyError, pickle.UnpicklingError, EOFError, ValueError, TypeError) as error:
        raise DataError(
            f"the file is not an array of initial states: {error}", code="invalid_initial_states", where=where
        ) from error
    if not isinstance(states, np.ndarray) or states.dtype != np.float64 or states.ndim != 2:
        raise DataError(
            "the initial states are not one float64 array (states, values)", code="invalid_initial_states", where=where
        )
    if not np.isfinite(states).all():
        raise DataError(
            f"initial state {np.argwhere(~np.isfinite(states))[0][0]} is not finite",
            code="invalid_initial_states",
            where=where,
        )
    return states


class _ArraysOnly(pickle.Unpickler):
    """Unpickler that refuses every name that a pickled array does not need."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _NEEDED:
            raise pickle.UnpicklingError(f"it refers to {module}.{name}, which an array of numbers does not need")
        return _NEEDED[module, name]

    def persistent_load(self, pid: object) -> Any:
        raise pickle.UnpicklingError("it refers to tensors in other files")
