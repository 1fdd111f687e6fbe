"""Where a two-finger gripper takes an object from above. Meters and radians, in the world's frame."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

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
