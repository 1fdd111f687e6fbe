"""Which tasks can be made easier: solved as soon as the gripper is near the object that they are about."""

from __future__ import annotations

import re
from collections.abc import Iterable

from armature.components.contracts.errors import ConfigurationError
from armature.components.environments.libero.settings import SimulatorSettings
from armature.components.environments.libero.tasks import LiberoTask


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
