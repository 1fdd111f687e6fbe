"""Faster versions of robosuite's operational space control and sensor updates, with bit-identical results.

One action of LIBERO is 25 physics steps, and robosuite computes torques for each of them: it looks up names, computes
Jacobians four times, builds the limits and asks 30 sensors whether they are due. The classes here do this with fewer
calls. The first of the 25 steps, which sets the controller's goal, is still computed by robosuite.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import mujoco
import numpy as np
from numpy.typing import NDArray
from robosuite.controllers.osc import OperationalSpaceController
from robosuite.utils.control_utils import nullspace_torques, opspace_matrices, orientation_error

# --- Compiling a task's model once, although robosuite compiles it at every reset; results are bit-identical ---

KEPT = 4
"""Number of compiled models that a process caches, for the tasks its simulators play. One takes up to 100 MB."""


@dataclass
class Compiled:
    """Holder of the compiled model that the last simulation was copied from.

    model: None until a simulation has been made. It is shared through the cache, so it must not be changed.
    """

    model: mujoco.MjModel | None = None


@contextmanager
def kept_models() -> Iterator[Compiled]:
    """Within this context, robosuite makes its simulations from copies of cached compiled models.

    robosuite compiles a task's XML document at each reset, although the document is always the same: everything that
    depends on the seed is set in the model afterwards.
    """
    from robosuite.utils.binding_utils import MjSim

    original, last = vars(MjSim)["from_xml_string"], Compiled()

    def from_xml_string(kind: type[MjSim], xml: str) -> MjSim:
        last.model = _compiled(xml)
        return kind(copy.copy(last.model))

    MjSim.from_xml_string = classmethod(from_xml_string)
    try:
        yield last
    finally:
        MjSim.from_xml_string = original


@lru_cache(KEPT)
def _compiled(xml: str) -> mujoco.MjModel:
    return mujoco.MjModel.from_xml_string(xml)


Vector = NDArray[np.float64]


def quicken(environment: Any) -> None:
    """Replace the control and sensor updates of robosuite's `environment` by the faster ones, until `restore`."""
    environment._pre_action = OperationalSpaceControl(environment)
    environment._update_observables = Sensors(environment)


def restore(environment: Any) -> None:
    """Undo `quicken`. Needed before a reset, because a reset creates new robot and controller objects."""
    vars(environment).pop("_pre_action", None)
    vars(environment).pop("_update_observables", None)


class OperationalSpaceControl:
    """Replacement of `_pre_action` for an environment with one Panda arm that is controlled by pose differences.

    Torques equal the ones of `OperationalSpaceController.run_controller` (Khatib 1987), clipped to the actuators'
    limits. Arrays have the same memory order as in robosuite, because the last bits of a matrix product depend on it.
    """

    def __init__(self, environment: Any) -> None:
        (robot,) = environment.robots
        controller, sim = robot.controller, environment.sim
        assert type(controller) is OperationalSpaceController and controller.impedance_mode == "fixed"
        assert controller.uncoupling and controller.interpolator_pos is None and controller.interpolator_ori is None
        self._robosuite = environment._pre_action
        self._sim, self._controller, self._gripper = sim, controller, robot.gripper
        self._model, self._data = sim.model._model, sim.data._data
        self._site = sim.model.site_name2id(controller.eef_name)
        self._positions, self._velocities = controller.qpos_index, controller.qvel_index
        self._arm = robot._ref_joint_actuator_indexes
        self._low, self._high = robot.torque_limits
        self._fingers = [sim.model.actuator_name2id(name) for name in robot.gripper.actuators]
        low, high = sim.model.actuator_ctrlrange[self._fingers].T
        self._middle, self._half = 0.5 * (high + low), 0.5 * (high - low)
        size, joints = self._model.nv, len(self._velocities)
        self._jacobians = np.zeros((2, 3, size))
        self._mass = np.zeros((size, size))
        self._arm_jacobian = np.zeros((6, joints), order="F")
        self._wrench = np.zeros(6)

    def __call__(self, action: Vector, policy_step: bool = False) -> None:
        if policy_step:
            self._robosuite(action, policy_step)
            return
        self._sim.forward()
        control, arm = self._data.ctrl, self._controller.control_dim
        control[self._arm] = np.minimum(np.maximum(self._torques(), self._low), self._high)
        control[self._fingers] = self._middle + self._half * self._gripper.format_action(action[arm:])

    def _torques(self) -> Vector:
        """Return the joint torques before clipping, (7,) in newton meters."""
        data, controller = self._data, self._controller
        (moved, turned), mass, jacobian = self._jacobians, self._mass, self._arm_jacobian
        mujoco.mj_jacSite(self._model, data, moved, turned, self._site)
        mujoco.mj_fullM(self._model, mass, data.qM)
        velocity = data.qvel
        arm_moved, arm_turned = moved[:, self._velocities], turned[:, self._velocities]
        jacobian[:3], jacobian[3:] = arm_moved, arm_turned
        arm_mass = mass[self._velocities, :][:, self._velocities]
        stiffness, damping = controller.kp, controller.kd
        position = controller.goal_pos - data.site_xpos[self._site]
        rotation = orientation_error(controller.goal_ori, data.site_xmat[self._site].reshape(3, 3).copy())
        force = position * stiffness[:3] + -moved.dot(velocity) * damping[:3]
        torque = rotation * stiffness[3:] + -turned.dot(velocity) * damping[3:]
        _, by_position, by_rotation, null_space = opspace_matrices(arm_mass, jacobian, arm_moved, arm_turned)
        self._wrench[:3], self._wrench[3:] = by_position.dot(force), by_rotation.dot(torque)
        torques: Vector = jacobian.T.dot(self._wrench) + data.qfrc_bias[self._velocities]
        torques += nullspace_torques(
            arm_mass, null_space, controller.initial_joint, data.qpos[self._positions], velocity[self._velocities]
        )
        return torques


class Sensors:
    """Replacement of robosuite's `_update_observables` that updates only the sensors whose sampling time has come."""

    def __init__(self, environment: Any) -> None:
        self._robosuite = environment._update_observables
        self._environment = environment

    def __call__(self, force: bool = False) -> None:
        if force:
            self._robosuite(force=True)
            return
        seconds, cache = self._environment.model_timestep, self._environment._obs_cache
        for sensor in self._environment._observables.values():
            since = sensor._time_since_last_sample + seconds
            if sensor._enabled and sensor._sampled and since < sensor._sampling_timestep:
                sensor._time_since_last_sample = since
            else:
                sensor.update(timestep=seconds, obs_cache=cache)
