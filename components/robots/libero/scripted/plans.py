"""Plans of the scripted policy: for each task the object, how to grasp it, and where to put it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from armature.components.contracts.errors import ConfigurationError
from armature.components.robots.libero.pro import base_suite, plain_name
from armature.components.robots.libero.tasks import LiberoTask

if TYPE_CHECKING:
    from armature.components.robots.libero.simulator import LiberoSimulator


# --- Grasps from above with a two-finger gripper, in meters and radians in the world's frame ---

Vector = NDArray[np.float64]

CLEARANCE = 0.008
"""Minimum distance in meters of the fingertips from the surface that the object stands on."""

_ROUND = 24
_CORNERS = np.array([[x, y, z] for x in (-1, 1) for y in (-1, 1) for z in (-1, 1)], np.float64)
_POLES = np.concatenate([np.eye(3), -np.eye(3)])


def rim_grasp(angle: float, radius: float, height: float) -> tuple[Vector, float]:
    """Return a grasp of a bowl's rim, with one finger inside the bowl and one outside.

    angle: direction from the bowl's origin to the point of the rim, in radians.

    Returns:
        Position of the fingertips relative to the object's origin, and yaw of the gripper.
    """
    place = np.array([radius * math.cos(angle), radius * math.sin(angle), height])
    return place, half_turn(angle + math.pi / 2)


def body_grasp(points: Vector, origin: Vector, depth: float) -> Vector:
    """Return the position of the fingertips, (3,), to grasp an object in the middle of its collision points.

    The position is `depth` below the highest point, but above the surface that the object stands on by `CLEARANCE`. It
    is relative to `origin`, the object's origin.
    """
    low, high = points.min(0), points.max(0)
    middle = (low + high) / 2
    z = max(high[2] - depth, low[2] + CLEARANCE)
    return np.array([middle[0], middle[1], z]) - origin


def upwards(meters: float) -> Vector:
    """Return a vector that points up, of this length."""
    return np.array([0.0, 0.0, meters])


def half_turn(yaw: float) -> float:
    """Return the equivalent yaw in [-90°, 90°): the two fingers are interchangeable.

    Example:
        >>> half_turn(math.pi)
        0.0
    """
    return (yaw + math.pi / 2) % math.pi - math.pi / 2


def collision_points(model: Any, data: Any, root: int) -> Vector:
    """Return points (n, 3) that span the collision geometry of body `root` and of all bodies attached to it.

    Coordinates are in the world's frame.
    """
    points = []
    for geometry in range(model.ngeom):
        collides = model.geom_contype[geometry] or model.geom_conaffinity[geometry]
        if collides and _within(model, model.geom_bodyid[geometry], root):
            rotation = data.geom_xmat[geometry].reshape(3, 3)
            points.append(_local_points(model, geometry) @ rotation.T + data.geom_xpos[geometry])
    return np.concatenate(points)


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

SCRIPTED_SUITES = ("libero_spatial", "libero_object", "libero_goal")
"""Suites that the scripted policy knows, with their variants in LIBERO-PRO."""

_BASKET, _BOWL, _BOTTLE, _CHEESE = "basket_contain_region", "akita_black_bowl", "wine_bottle", "cream_cheese"
_CABINET, _RACK = "wooden_cabinet_top_side", "wine_rack_top_region"
_HEIGHTS = {
    (_BOWL, "plate"): 0.006,
    (_BOWL, "flat_stove_cook_region"): 0.024,
    (_BOWL, _CABINET): 0.004,
    (_BOTTLE, _CABINET): 0.006,
    (_BOTTLE, "plate"): 0.010,
    (_BOTTLE, _BOWL): 0.014,
    (_CHEESE, _BOWL): 0.045,
    (_CHEESE, _RACK): 0.030,
    (_CHEESE, "main_table_stove_front_region"): 0.030,
}
"""Height in meters of an object's origin above its place, by object and place. Everything can be put into a basket."""
_RIM_ANGLE, _RIM_RADIUS, _RIM_HEIGHT = math.radians(135), 0.048, 0.034


def is_scripted(task: LiberoTask) -> bool:
    """Return True if the scripted policy supports the task: it picks up one object and puts it somewhere."""
    if base_suite(task.suite) not in SCRIPTED_SUITES or len(task.goal) > 1:
        return False
    _, *names = task.goal[0]
    kinds = tuple(plain_name(name) for name in names)
    return kinds[-1] == _BASKET or kinds in _HEIGHTS


@dataclass(frozen=True)
class PickPlacePlan:
    """Plan of picking up an object and putting it down. Lengths in meters, speeds as parts of the largest action.

    grasp: returns the fingertips' position relative to the object's origin, and the gripper's yaw.
    target: returns the target position of the object's origin.
    hover: height above the grasp before descending. cruise: minimum height on the way there.
    carry: minimum height before the object is moved sideways. drop: height above the target before lowering.
    reach: the object counts as lost if it is farther than this from the gripper. lowering: speed while lowering.
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
    """Return the plan for the simulator's current episode.

    Raises:
        ConfigurationError: the task is not a simple pick and place.
    """
    task = simulator.task
    if not is_scripted(task):
        raise ConfigurationError(
            f"the scripted policy does not support the task {task.language!r}",
            code="task_not_scripted",
            where=f"{task.suite}, task {task.index}",
            remedy=f"choose a task that puts one object somewhere, in a suite of {', '.join(SCRIPTED_SUITES)}",
        )
    _, item, place = simulator.goal[0]
    kinds = plain_name(item), plain_name(place)
    if kinds[1] == _BASKET:
        return _into_basket(simulator, item, place)
    target = _above(simulator, place, _HEIGHTS[kinds])
    high = 1.42 if kinds[0] == _BOTTLE else 1.26
    carry = high if kinds[1] in (_CABINET, _RACK) else 0.0
    if kinds[0] == _BOWL:
        scale = 1.5 if item.startswith("bigger") else 1.0
        rim = rim_grasp(_RIM_ANGLE, scale * _RIM_RADIUS, scale * _RIM_HEIGHT)
        return PickPlacePlan(item, lambda _: rim, target, carry=carry)
    if kinds[0] == _BOTTLE:
        grasp = _body(simulator, item, 0.050)
        return PickPlacePlan(item, grasp, target, hover=0.10, cruise=1.2, carry=carry, reach=0.20)
    return PickPlacePlan(item, _body(simulator, item, 0.010), target, carry=carry)


def _into_basket(simulator: LiberoSimulator, item: str, place: str) -> PickPlacePlan:
    points = collision_points(*simulator.body(item))
    height = float(np.ptp(points[:, 2]))
    above_base = float(simulator.observed[f"{item}_pos"][2] - points[:, 2].min())

    def target(_: Observed) -> Vector:
        inside = simulator.site(place)
        return np.array([inside[0], inside[1], above_base + 0.03])

    grasp = _body(simulator, item, min(0.035, height - 0.008))
    return PickPlacePlan(item, grasp, target, hover=0.09, cruise=0.25, carry=0.27, drop=0.17, reach=0.16, lowering=0.6)


def _body(simulator: LiberoSimulator, item: str, depth: float) -> Callable[[Observed], tuple[Vector, float]]:
    return lambda seen: (body_grasp(collision_points(*simulator.body(item)), seen[f"{item}_pos"], depth), 0.0)


def _above(simulator: LiberoSimulator, place: str, height: float) -> Callable[[Observed], Vector]:
    if f"{place}_pos" in simulator.observed:
        return lambda seen: seen[f"{place}_pos"] + upwards(height)
    site = simulator.site(place) + upwards(height)
    return lambda _: site
