"""What the scripted policy does in a task: which object, how it is taken, and where it goes."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from armature.components.contracts.errors import ConfigurationError

if TYPE_CHECKING:
    from armature.components.robots.libero.simulator import LiberoSimulator


# Where a two-finger gripper takes an object from above. Meters and radians, in the world's frame.

Vector = NDArray[np.float64]

CLEARANCE = 0.008
"""Of the fingertips over what the object stands on."""

_ROUND = 24
_CORNERS = np.array([[x, y, z] for x in (-1, 1) for y in (-1, 1) for z in (-1, 1)], np.float64)
_POLES = np.concatenate([np.eye(3), -np.eye(3)])


def rim_grasp(angle: float, radius: float, height: float) -> tuple[Vector, float]:
    """Of a bowl by its rim: one finger inside and one outside, at `angle` as seen from the bowl's origin.

    Returns:
        The fingertips' place from the object's origin, and the gripper's yaw.
    """
    place = np.array([radius * math.cos(angle), radius * math.sin(angle), height])
    return place, half_turn(angle + math.pi / 2)


def body_grasp(points: Vector, origin: Vector, depth: float) -> Vector:
    """Of the middle of an object's collision hull, `depth` below its top: the place from the object's origin."""
    low, high = points.min(0), points.max(0)
    middle = (low + high) / 2
    z = max(high[2] - depth, low[2] + CLEARANCE)
    return np.array([middle[0], middle[1], z]) - origin


def upwards(meters: float) -> Vector:
    return np.array([0.0, 0.0, meters])


def half_turn(yaw: float) -> float:
    """The same grasp within a quarter turn of 0: the fingers are alike."""
    return (yaw + math.pi / 2) % math.pi - math.pi / 2


def collision_points(model: Any, data: Any, root: int) -> Vector:
    """World points (n, 3) that span the collision geometry of body `root` and all that is attached to it."""
    found = []
    for geometry in range(model.ngeom):
        collides = model.geom_contype[geometry] or model.geom_conaffinity[geometry]
        if collides and _within(model, model.geom_bodyid[geometry], root):
            rotation = data.geom_xmat[geometry].reshape(3, 3)
            found.append(_local_points(model, geometry) @ rotation.T + data.geom_xpos[geometry])
    return np.concatenate(found)


def _within(model: Any, body: int, root: int) -> bool:
    while body not in (0, root):
        body = model.body_parentid[body]
    return body == root


def _local_points(model: Any, geometry: int) -> Vector:
    import mujoco

    kinds, size = mujoco.mjtGeom, model.geom_size[geometry]
    kind = model.geom_type[geometry]
    if kind == kinds.mjGEOM_BOX:
        return np.asarray(_CORNERS * size)
    if kind in (kinds.mjGEOM_CYLINDER, kinds.mjGEOM_CAPSULE):
        turn = np.linspace(0, 2 * math.pi, _ROUND, endpoint=False)
        half = size[1] + (size[0] if kind == kinds.mjGEOM_CAPSULE else 0.0)
        ring = np.stack([size[0] * np.cos(turn), size[0] * np.sin(turn), np.full(_ROUND, half)], axis=1)
        return np.concatenate([ring, ring * [1, 1, -1]])
    if kind == kinds.mjGEOM_SPHERE:
        return np.asarray(_POLES * size[0])
    if kind == kinds.mjGEOM_ELLIPSOID:
        return np.asarray(_POLES * size)
    if kind == kinds.mjGEOM_MESH:
        mesh = model.geom_dataid[geometry]
        start = model.mesh_vertadr[mesh]
        return np.asarray(model.mesh_vert[start : start + model.mesh_vertnum[mesh]], np.float64)
    return np.empty((0, 3))


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
