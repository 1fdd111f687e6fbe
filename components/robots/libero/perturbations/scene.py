"""Perturbations of a MuJoCo scene: cameras, lights, textures, positions of objects and of the arm."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import mujoco


Numbers = NDArray[np.float64]
ROBOT = ("robot0_", "gripper0_", "mount0_")
"""Prefixes of the names of the robot's bodies."""


@dataclass(frozen=True)
class PerturbedScene:
    """A simulation, and the bodies and joints of it that perturbations may change.

    objects, fixtures: root body of each movable object and each fixture, by name.
    targets: names of the objects that the task is about.
    arm: addresses of the arm's joints in qpos.
    """

    model: mujoco.MjModel
    data: mujoco.MjData
    objects: dict[str, int]
    fixtures: dict[str, int]
    targets: Collection[str]
    arm: list[int]

    @classmethod
    def of(cls, environment: Any) -> PerturbedScene:
        """Return the scene of a LIBERO environment."""
        numbers, sim = environment.obj_body_id, environment.sim
        return cls(
            model=sim.model._model,
            data=sim.data._data,
            objects={name: int(numbers[name]) for name in sorted(environment.objects_dict)},
            fixtures={name: int(numbers[name]) for name in sorted(environment.fixtures_dict) if name in numbers},
            targets=tuple(environment.obj_of_interest),
            arm=[int(number) for number in environment.robots[0]._ref_joint_pos_indexes],
        )

    @property
    def roots(self) -> NDArray[np.int32]:
        """Number of the root body that each geom belongs to, (geoms,); 0 for geoms of the world body."""
        return np.asarray(self.model.body_rootid[self.model.geom_bodyid])

    @property
    def robot(self) -> set[int]:
        """Numbers of the root bodies of the robot: arm, gripper and mount."""
        bodies = range(self.model.nbody)
        return {int(self.model.body_rootid[body]) for body in bodies if self.model.body(body).name.startswith(ROBOT)}

    @property
    def scenery(self) -> NDArray[np.bool_]:
        """Mask of the geoms of tables, floors and walls, (geoms,)."""
        things = {*self.objects.values(), *self.fixtures.values(), *self.robot} - {0}
        return ~np.isin(self.roots, list(things))

    @property
    def solid(self) -> NDArray[np.bool_]:
        """Mask of the geoms that collide, (geoms,); the others are only visible."""
        return (self.model.geom_contype != 0) | (self.model.geom_conaffinity != 0)


def distance(model: mujoco.MjModel, data: mujoco.MjData, first: Collection[int], other: Collection[int]) -> float:
    """Return the distance in meters between two sets of geoms, at most `FAR`; negative if they penetrate each other.

    Poses in `data` must be current.
    """
    import mujoco

    nearest = FAR
    for a, b in _near(model, data, np.array(list(first), int), np.array(list(other), int)):
        nearest = min(nearest, mujoco.mj_geomDistance(model, data, a, b, FAR, None))
    return nearest


FAR = 0.05


def _near(
    model: mujoco.MjModel, data: mujoco.MjData, first: NDArray[np.int_], other: NDArray[np.int_]
) -> Iterator[tuple[int, int]]:
    """Yield pairs of geoms whose bounding spheres are closer than `FAR`."""
    apart = np.linalg.norm(data.geom_xpos[first][:, None] - data.geom_xpos[other][None], axis=2)
    bounds = model.geom_rbound[first][:, None] + model.geom_rbound[other][None]
    for row, column in np.argwhere(apart - bounds < FAR):
        yield int(first[row]), int(other[column])


def bounds(model: mujoco.MjModel, data: mujoco.MjData, geoms: Collection[int]) -> tuple[Numbers, Numbers]:
    """Return the lowest and the highest corner, (3,) each, of an axis-aligned box around all these geoms."""
    chosen = np.array(list(geoms), int)
    turned = data.geom_xmat[chosen].reshape(-1, 3, 3)
    centers = data.geom_xpos[chosen] + np.einsum("nij,nj->ni", turned, model.geom_aabb[chosen, :3])
    halves = np.einsum("nij,nj->ni", np.abs(turned), model.geom_aabb[chosen, 3:])
    return (centers - halves).min(axis=0), (centers + halves).max(axis=0)


# --- Perturbations of what cameras see. A reset creates a new model, so nothing has to be undone ---

ORBIT = np.radians([10.0, 20.0, 5.0])
"""Largest rotations around the camera's own axes: right, up and backward."""
DISTANCE, FIELD = 0.15, 0.15
AHEAD, AHEAD_ON_ROBOT = 1.0, 0.1
"""Assumed distance in meters from a camera to the point that it looks at."""
COLLISION = 0
"""MuJoCo's group number (`geom_group`) of the geoms that are not rendered."""
MOVE, TILT, BRIGHTNESS, TINT, AMBIENT = 1.5, np.radians(30.0), 2.5, 0.3, 0.3


def perturb_camera(scene: PerturbedScene, strength: float, rng: np.random.Generator) -> None:
    """Rotate cameras around the point they look at, move them closer or farther and change their field of view."""
    import mujoco

    model = scene.model
    for camera in range(model.ncam):
        drawn = strength * rng.uniform(-1, 1, 5)
        ahead = AHEAD if model.cam_bodyid[camera] == 0 else AHEAD_ON_ROBOT
        turn, turned, axes = np.zeros(4), np.zeros(4), np.zeros(9)
        mujoco.mju_euler2Quat(turn, ORBIT * drawn[:3], "xyz")
        mujoco.mju_mulQuat(turned, model.cam_quat[camera], turn)
        mujoco.mju_quat2Mat(axes, model.cam_quat[camera])
        focus = model.cam_pos[camera] - ahead * axes[2::3]  # a camera looks along its negative z
        mujoco.mju_quat2Mat(axes, turned)
        model.cam_pos[camera] = focus + ahead * (1 + DISTANCE * drawn[3]) * axes[2::3]
        model.cam_quat[camera] = turned
        model.cam_fovy[camera] *= 1 + FIELD * drawn[4]


def perturb_light(scene: PerturbedScene, strength: float, rng: np.random.Generator) -> None:
    """Move and rotate lights, change their brightness and color, and change the ambient light of the scene."""
    import mujoco

    model = scene.model
    for light in range(model.nlight):
        drawn, turn, axis = strength * rng.uniform(-1, 1, 8), np.zeros(4), np.zeros(3)
        model.light_pos[light, :2] += MOVE * drawn[:2]
        mujoco.mju_euler2Quat(turn, TILT * np.array([drawn[2], drawn[3], 0.0]), "xyz")
        mujoco.mju_rotVecQuat(axis, model.light_dir[light], turn)
        model.light_dir[light] = axis
        model.light_diffuse[light] *= BRIGHTNESS ** drawn[4] * (1 + TINT * drawn[5:])
    whole = model.vis.headlight
    drawn = strength * rng.uniform(-1, 1, 2)
    whole.diffuse[:] *= BRIGHTNESS ** drawn[0]
    whole.ambient[:] += AMBIENT * abs(drawn[1])


def perturb_texture(scene: PerturbedScene, strength: float, rng: np.random.Generator) -> None:
    """Blend the textures of the scenery with random patterns, and colors of untextured parts with random colors.

    Materials and textures that objects share with the scenery are not changed.
    """
    import mujoco

    model = scene.model
    scenery = scene.scenery & (model.geom_group != COLLISION)
    used = {int(one) for one in model.geom_matid[scenery]} - {-1}
    materials = sorted(used - {int(one) for one in model.geom_matid[~scenery]})
    skies = np.flatnonzero(model.tex_type == mujoco.mjtTexture.mjTEXTURE_SKYBOX)
    textures = {int(one) for one in skies}
    for material in materials:
        images = {int(one) for one in model.mat_texid[material]} - {-1}
        textures |= images
        if not images:
            _fade(model.mat_rgba[material], strength, rng)
    for geom in np.flatnonzero(scenery & (model.geom_matid == -1)):
        _fade(model.geom_rgba[geom], strength, rng)
    shared = {int(one) for material in set(range(model.nmat)) - set(materials) for one in model.mat_texid[material]}
    for texture in sorted(textures - shared):
        height, width, channels = (int(of[texture]) for of in (model.tex_height, model.tex_width, model.tex_nchannel))
        start = int(model.tex_adr[texture])
        image = model.tex_data[start : start + height * width * channels].reshape(height, width, channels)
        shown = min(3, channels)
        faded = (1 - strength) * image[..., :shown] + strength * _pattern(height, width, rng)[..., :shown]
        image[..., :shown] = np.rint(faded)


def _fade(rgba: NDArray[np.float32], strength: float, rng: np.random.Generator) -> None:
    rgba[:3] = (1 - strength) * rgba[:3] + strength * rng.uniform(0, 1, 3)


def _pattern(height: int, width: int, rng: np.random.Generator) -> NDArray[np.float64]:
    """Return a pattern of two colors, (height, width, 3) from 0 to 255: a checkerboard, stripes or random squares."""
    colors = rng.uniform(0, 255, (2, 3))
    kind, size = rng.integers(3), max(1, width // int(rng.integers(2, 9)))
    blots = rng.integers(0, 2, (height // size + 1, width // size + 1))
    down, right = np.mgrid[:height, :width] // size
    chosen = [(down + right) % 2, right % 2, blots[down, right]][kind]
    return np.asarray(colors[chosen])


# --- Perturbations of positions, after objects have come to rest. Afterwards nothing penetrates ---

LAYOUT, DISTRACTORS, YAW = 0.05, 0.10, np.radians(30.0)
JOINTS = 0.15
CLEAR = 0.005
"""Minimum distance in meters between a moved object and any other."""
STANDS, RIDES = 0.01, 0.02
"""Maximum distances in meters: the height of an object above a surface that it stands on, and the distance between an
object and the object that it stands on."""
EVEN = 0.001
AWAY = 100.0
TRIES = 100


def perturb_layout(scene: PerturbedScene, strength: float, rng: np.random.Generator) -> None:
    """Move and rotate every object that stands freely."""
    _move(scene, strength, rng, list(scene.objects), LAYOUT)


def perturb_distractors(scene: PerturbedScene, strength: float, rng: np.random.Generator) -> None:
    """Move and rotate every object that stands freely and that the task is not about."""
    _move(scene, strength, rng, [name for name in scene.objects if name not in scene.targets], DISTRACTORS)


def perturb_robot(scene: PerturbedScene, strength: float, rng: np.random.Generator) -> None:
    """Change the arm's joints within their limits. If the robot touches something in every try, nothing changes."""
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
    """Surface that an object stands on. body: root body of the surface. height: its z in meters, below the object."""

    body: int
    height: float


class _Ground:
    """Copy of the scene with all movable objects lifted out of the way, to find the surfaces below the objects."""

    def __init__(self, scene: PerturbedScene) -> None:
        import mujoco

        self._scene, self._empty = scene, mujoco.MjData(scene.model)
        self._empty.qpos[:] = scene.data.qpos
        for body in scene.objects.values():
            self._empty.qpos[_address(scene, body) + 2] += AWAY
        mujoco.mj_kinematics(scene.model, self._empty)

    def below(self, point: Numbers) -> _Surface | None:
        """Return the first surface below the point, or None if there is none."""
        import mujoco

        down, geom = np.array([0.0, 0.0, -1.0]), np.array([-1], np.int32)
        length = mujoco.mj_ray(self._scene.model, self._empty, point, down, None, 1, -1, geom)
        if geom[0] < 0:
            return None
        return _Surface(int(self._scene.roots[geom[0]]), float(point[2] - length))

    def carries(self, body: int, surface: _Surface) -> bool:
        """Return True if the whole object is above one flat part of the surface."""
        low, high = bounds(self._scene.model, self._scene.data, _geoms(self._scene, [body]))
        middle = (low + high) / 2
        corners = [np.array([x, y, middle[2]]) for x in (low[0], high[0]) for y in (low[1], high[1])]
        surfaces = [self.below(point) for point in (middle, *corners)]
        return all(
            each is not None and each.body == surface.body and abs(each.height - surface.height) < EVEN
            for each in surfaces
        )


@dataclass(frozen=True)
class _Stack:
    """Names of an object that stands on a table or the floor and of the objects on top of it."""

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
    """Return the scene's stacks, which are moved as a whole.

    Objects in drawers, on fixtures or in the air belong to no stack and are not moved.
    """
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
    """Return the index in qpos of the first of a free body's seven numbers (position and quaternion)."""
    return int(scene.model.jnt_qposadr[scene.model.body_jntadr[body]])


def _shift(scene: PerturbedScene, bodies: list[int], shift: Numbers, yaw: float) -> None:
    """Move free bodies horizontally by `shift` (2,), and rotate them by `yaw` radians.

    All bodies are rotated around the vertical axis through the first body.
    """
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
    """Return True if nothing but tables, floors and walls is within `CLEAR` of the bodies."""
    others = np.flatnonzero(scene.solid & ~scene.scenery & ~np.isin(scene.roots, bodies))
    return distance(scene.model, scene.data, _geoms(scene, bodies), others.tolist()) >= CLEAR
