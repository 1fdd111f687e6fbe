"""What the scripted policy does in a task: which object, how it is taken, and where it goes."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from armature.components.contracts.errors import ConfigurationError
from armature.components.environments.libero.scripted.grasps import body_grasp, collision_points, rim_grasp, upwards

if TYPE_CHECKING:
    from armature.components.environments.libero.simulator import LiberoSimulator

Vector = NDArray[np.float64]
Observed = dict[str, Any]

SCRIPTED_TASKS = {
    "libero_spatial": tuple(range(10)),
    "libero_object": tuple(range(10)),
    "libero_goal": (1, 2, 4, 6, 8),
}
"""Tasks that are one object taken and put somewhere."""

_BOWL, _PLATE, _RIM_ANGLE, _RIM_RADIUS, _RIM_HEIGHT = "akita_black_bowl", "plate_1", math.radians(135), 0.048, 0.034


@dataclass(frozen=True)
class PickPlacePlan:
    """Lengths in meters; speeds as parts of the largest action.

    grasp: Where the fingertips go from the object's origin, and the gripper's yaw.
    target: Where the object's origin goes.
    hover: Over the grasp, before going down. cruise: Least height on the way there.
    carry: Least height before the object is moved sideways. drop: Over the target, before it is lowered.
    reach: The object is lost when it is farther from the gripper.
    """

    item: str
    grasp: Callable[[Observed], tuple[Vector, float]]
    target: Callable[[Observed], Vector]
    hover: float = 0.08
    cruise: float = 1.10
    carry: float = 0.0
    drop: float = 0.05
    reach: float = 0.14
    lowering: float = 0.35


def plan_for(simulator: LiberoSimulator) -> PickPlacePlan:
    """For the episode that was reset last.

    Raises:
        ConfigurationError: the task is not a plain pick and place.
    """
    task, goal = simulator.task, simulator.goal[0]
    if task.index not in SCRIPTED_TASKS.get(task.suite, ()):
        known = "; ".join(f"{suite}: {', '.join(map(str, tasks))}" for suite, tasks in SCRIPTED_TASKS.items())
        raise ConfigurationError(
            f"the scripted policy cannot do {task.language!r}",
            code="task_not_scripted",
            where=f"{task.suite}, task {task.index}",
            remedy=f"choose among {known}",
        )
    _, item, place = goal
    if task.suite == "libero_object":
        return _into_basket(simulator, item)
    if item.startswith(_BOWL):
        return _bowl(simulator, item, place)
    if item.startswith("wine_bottle"):
        target = _constant(simulator.site(place) + upwards(0.006))
        return PickPlacePlan(
            item, _body(simulator, item, 0.050), target, hover=0.10, cruise=1.2, carry=1.42, reach=0.20
        )
    return PickPlacePlan(item, _body(simulator, item, 0.010), lambda seen: seen[f"{_BOWL}_1_pos"] + upwards(0.045))


def _bowl(simulator: LiberoSimulator, item: str, place: str) -> PickPlacePlan:
    rim = rim_grasp(_RIM_ANGLE, _RIM_RADIUS, _RIM_HEIGHT)
    if place == _PLATE:
        return PickPlacePlan(item, lambda _: rim, lambda seen: seen[f"{_PLATE}_pos"] + upwards(0.006))
    if "cook_region" in place:
        return PickPlacePlan(item, lambda _: rim, _constant(simulator.site(place) + upwards(0.024)))
    return PickPlacePlan(item, lambda _: rim, _constant(simulator.site(place) + upwards(0.004)), carry=1.26)


def _into_basket(simulator: LiberoSimulator, item: str) -> PickPlacePlan:
    points = collision_points(*simulator.body(item))
    height = float(np.ptp(points[:, 2]))
    above_base = float(simulator.observed[f"{item}_pos"][2] - points[:, 2].min())

    def target(_: Observed) -> Vector:
        inside = simulator.site("basket_1_contain_region")
        return np.array([inside[0], inside[1], above_base + 0.03])

    grasp = _body(simulator, item, min(0.035, height - 0.008))
    return PickPlacePlan(item, grasp, target, hover=0.09, cruise=0.25, carry=0.27, drop=0.17, reach=0.16, lowering=0.6)


def _body(simulator: LiberoSimulator, item: str, depth: float) -> Callable[[Observed], tuple[Vector, float]]:
    return lambda seen: (body_grasp(collision_points(*simulator.body(item)), seen[f"{item}_pos"], depth), 0.0)


def _constant(place: Vector) -> Callable[[Observed], Vector]:
    return lambda _: place
