"""Where things are, changed when they have come to rest: objects and the robot's joints. Nothing then penetrates."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from armature.components.environments.libero.perturbations.scene import Numbers, PerturbedScene, bounds, distance

LAYOUT, DISTRACTORS, YAW = 0.05, 0.10, np.radians(30.0)
JOINTS = 0.15
CLEAR = 0.005
"""Meters between a moved object and any other."""
STANDS, RIDES = 0.01, 0.02
"""Meters above a surface on which an object stands; from an object on which it rides."""
EVEN = 0.001
AWAY = 100.0
TRIES = 100


def perturb_layout(scene: PerturbedScene, strength: float, rng: np.random.Generator) -> None:
    """Every object that stands freely, on another place."""
    _move(scene, strength, rng, list(scene.objects), LAYOUT)


def perturb_distractors(scene: PerturbedScene, strength: float, rng: np.random.Generator) -> None:
    """The objects that the task is not about, on other places."""
    _move(scene, strength, rng, [name for name in scene.objects if name not in scene.targets], DISTRACTORS)


def perturb_robot(scene: PerturbedScene, strength: float, rng: np.random.Generator) -> None:
    """The arm's joints, within their limits; as before if in no try the robot touches nothing."""
    import mujoco

    model, data = scene.model, scene.data
    joints = [int(np.flatnonzero(model.jnt_qposadr == address)[0]) for address in scene.arm]
    low, high = model.jnt_range[joints].T
    before = data.qpos[scene.arm].copy()
    robot, roots = list(scene.robot), scene.roots
    for _ in range(TRIES):
        data.qpos[scene.arm] = np.clip(before + JOINTS * strength * rng.uniform(-1, 1, len(joints)), low, high)
        mujoco.mj_forward(model, data)
        if not np.isin(roots[data.contact.geom], robot).any():
            return
    data.qpos[scene.arm] = before
    mujoco.mj_forward(model, data)


@dataclass(frozen=True)
class _Surface:
    """What an object stands on: the root body, and how high it is there."""

    body: int
    height: float


class _Ground:
    """What lies below the objects of a scene, were all of them away."""

    def __init__(self, scene: PerturbedScene) -> None:
        import mujoco

        self._scene, self._empty = scene, mujoco.MjData(scene.model)
        self._empty.qpos[:] = scene.data.qpos
        for body in scene.objects.values():
            self._empty.qpos[_address(scene, body) + 2] += AWAY
        mujoco.mj_kinematics(scene.model, self._empty)

    def below(self, point: Numbers) -> _Surface | None:
        """What a ray straight down meets first."""
        import mujoco

        down, geom = np.array([0.0, 0.0, -1.0]), np.array([-1], np.int32)
        length = mujoco.mj_ray(self._scene.model, self._empty, point, down, None, 1, -1, geom)
        if geom[0] < 0:
            return None
        return _Surface(int(self._scene.roots[geom[0]]), float(point[2] - length))

    def carries(self, body: int, surface: _Surface) -> bool:
        """Whether the whole of an object is above one even surface."""
        low, high = bounds(self._scene.model, self._scene.data, _geoms(self._scene, [body]))
        middle = (low + high) / 2
        corners = [np.array([x, y, middle[2]]) for x in (low[0], high[0]) for y in (low[1], high[1])]
        found = [self.below(point) for point in (middle, *corners)]
        return all(
            each is not None and each.body == surface.body and abs(each.height - surface.height) < EVEN
            for each in found
        )


@dataclass(frozen=True)
class _Stack:
    """An object that stands on a table or the floor, and those that it carries, by name."""

    names: list[str]
    surface: _Surface


def _move(
    scene: PerturbedScene, strength: float, rng: np.random.Generator, names: Collection[str], limit: float
) -> None:
    import mujoco

    mujoco.mj_forward(scene.model, scene.data)
    ground = _Ground(scene)
    for stack in _stacks(scene, ground):
        if not set(stack.names) <= set(names):
            continue
        bodies = [scene.objects[name] for name in stack.names]
        before = scene.data.qpos.copy()
        for _ in range(TRIES):
            length, angle, yaw = limit * strength * rng.uniform(0.5, 1), rng.uniform(0, 2 * np.pi), rng.uniform(-1, 1)
            scene.data.qpos[:] = before
            _shift(scene, bodies, length * np.array([np.cos(angle), np.sin(angle)]), YAW * strength * yaw)
            mujoco.mj_forward(scene.model, scene.data)
            if _free(scene, bodies) and ground.carries(bodies[0], stack.surface):
                break
        else:
            scene.data.qpos[:] = before
            mujoco.mj_forward(scene.model, scene.data)


def _stacks(scene: PerturbedScene, ground: _Ground) -> list[_Stack]:
    """Objects in drawers, on fixtures and in the air are in none: they stay where they are."""
    scenery = set(scene.roots[scene.scenery].tolist())
    stacks: list[_Stack] = []
    higher: list[str] = []
    for name, body in scene.objects.items():
        low, high = bounds(scene.model, scene.data, _geoms(scene, [body]))
        surface = ground.below((low + high) / 2)
        if surface is None or surface.body not in scenery:
            continue
        if low[2] - surface.height < STANDS:
            stacks.append(_Stack([name], surface))
        else:
            higher.append(name)
    for name in higher:
        geoms = _geoms(scene, [scene.objects[name]])
        for stack in stacks:
            carriers = _geoms(scene, [scene.objects[each] for each in stack.names])
            if distance(scene.model, scene.data, geoms, carriers) < RIDES:
                stack.names.append(name)
                break
    return stacks


def _address(scene: PerturbedScene, body: int) -> int:
    """Where in qpos the seven numbers of a free body begin."""
    return int(scene.model.jnt_qposadr[scene.model.body_jntadr[body]])


def _shift(scene: PerturbedScene, bodies: list[int], shift: Numbers, yaw: float) -> None:
    """Move free bodies by `shift` and turn them around the first one's vertical axis."""
    import mujoco

    qpos = scene.data.qpos
    starts = [_address(scene, body) for body in bodies]
    middle = qpos[starts[0] : starts[0] + 2].copy()
    turn, turned = np.array([np.cos(yaw / 2), 0.0, 0.0, np.sin(yaw / 2)]), np.zeros(4)
    plane = np.array([[np.cos(yaw), -np.sin(yaw)], [np.sin(yaw), np.cos(yaw)]])
    for start in starts:
        qpos[start : start + 2] = middle + plane @ (qpos[start : start + 2] - middle) + shift
        mujoco.mju_mulQuat(turned, turn, qpos[start + 3 : start + 7])
        qpos[start + 3 : start + 7] = turned


def _geoms(scene: PerturbedScene, bodies: Collection[int]) -> list[int]:
    return [int(geom) for geom in np.flatnonzero(np.isin(scene.roots, list(bodies)) & scene.solid)]


def _free(scene: PerturbedScene, bodies: list[int]) -> bool:
    """Whether nothing but tables, floors and walls is near."""
    others = np.flatnonzero(scene.solid & ~scene.scenery & ~np.isin(scene.roots, bodies))
    return distance(scene.model, scene.data, _geoms(scene, bodies), others.tolist()) >= CLEAR
