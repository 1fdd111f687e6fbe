"""A simulation as perturbations see it, and how far things in it are apart."""

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
"""How bodies of the robot are called."""


@dataclass(frozen=True)
class PerturbedScene:
    """MuJoCo's model and data; objects that can be moved and fixtures by name, each with the number of its root body;
    the objects that the task is about; addresses of the arm's joints in qpos."""

    model: mujoco.MjModel
    data: mujoco.MjData
    objects: dict[str, int]
    fixtures: dict[str, int]
    targets: Collection[str]
    arm: list[int]

    @classmethod
    def of(cls, environment: Any) -> PerturbedScene:
        """Of a LIBERO environment."""
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
        """(geoms,): the root body of each; 0 of those that belong to the world itself."""
        return np.asarray(self.model.body_rootid[self.model.geom_bodyid])

    @property
    def robot(self) -> set[int]:
        """Root bodies of the robot."""
        bodies = range(self.model.nbody)
        return {int(self.model.body_rootid[body]) for body in bodies if self.model.body(body).name.startswith(ROBOT)}

    @property
    def scenery(self) -> NDArray[np.bool_]:
        """(geoms,): those of tables, floors and walls."""
        things = {*self.objects.values(), *self.fixtures.values(), *self.robot} - {0}
        return ~np.isin(self.roots, list(things))

    @property
    def solid(self) -> NDArray[np.bool_]:
        """(geoms,): those that collide, and are not only seen."""
        return (self.model.geom_contype != 0) | (self.model.geom_conaffinity != 0)


def distance(model: mujoco.MjModel, data: mujoco.MjData, first: Collection[int], other: Collection[int]) -> float:
    """Meters between two sets of geoms, negative where they penetrate; at most `FAR`. Poses must be current."""
    import mujoco

    nearest = FAR
    for a, b in _near(model, data, np.array(list(first), int), np.array(list(other), int)):
        nearest = min(nearest, mujoco.mj_geomDistance(model, data, a, b, FAR, None))
    return nearest


FAR = 0.05


def _near(
    model: mujoco.MjModel, data: mujoco.MjData, first: NDArray[np.int_], other: NDArray[np.int_]
) -> Iterator[tuple[int, int]]:
    """Pairs whose bounding spheres are nearer than `FAR`."""
    apart = np.linalg.norm(data.geom_xpos[first][:, None] - data.geom_xpos[other][None], axis=2)
    bounds = model.geom_rbound[first][:, None] + model.geom_rbound[other][None]
    for row, column in np.argwhere(apart - bounds < FAR):
        yield int(first[row]), int(other[column])


def bounds(model: mujoco.MjModel, data: mujoco.MjData, geoms: Collection[int]) -> tuple[Numbers, Numbers]:
    """(3,) each: the lowest and the highest coordinates of boxes around the geoms."""
    chosen = np.array(list(geoms), int)
    turned = data.geom_xmat[chosen].reshape(-1, 3, 3)
    centers = data.geom_xpos[chosen] + np.einsum("nij,nj->ni", turned, model.geom_aabb[chosen, :3])
    halves = np.einsum("nij,nj->ni", np.abs(turned), model.geom_aabb[chosen, 3:])
    return (centers - halves).min(axis=0), (centers + halves).max(axis=0)
