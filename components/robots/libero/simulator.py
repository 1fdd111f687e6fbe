"""One LIBERO task, simulated: reset to a stored initial state, stepped by actions, seen through cameras."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from armature.components.contracts.errors import DataError
from armature.components.contracts.robots import RobotObservation
from armature.components.robots.libero.package import assets_folder, import_libero, use_assets
from armature.components.robots.libero.progress import GoalProgress, goal_progress
from armature.components.robots.libero.settings import IMAGES, Perturbation, SimulatorSettings
from armature.components.robots.libero.tasks import ACTION_NAMES, LiberoTask, load_initial_states

# What robosuite computes three times for each step of the physics, computed once, with the same bits.


@contextmanager
def one_pass(sim: Any) -> Iterator[None]:
    """Inside, each step of the physics of robosuite's `sim` has one pass of forward dynamics.

    Before a step, robosuite asks for all of the forward dynamics twice: for itself and for the controller, which reads
    positions, velocities, Jacobians and masses. `mj_step` then begins with a third time, with the new controls.
    `mj_step1` is the part that does not depend on controls, and `mj_step2` the rest: together they are `mj_step`, as
    MuJoCo documents it, but for the integrator RK4, whose physics stays as it is.

    Nothing but controls may be changed between `sim.forward` and `sim.step`.
    """
    import mujoco

    model, data = sim.model._model, sim.data._data
    if model.opt.integrator == mujoco.mjtIntegrator.mjINT_RK4:
        yield
        return
    ready = False

    def forward() -> None:
        nonlocal ready
        if not ready:
            mujoco.mj_step1(model, data)
            ready = True

    def step(with_udd: bool = True) -> None:
        nonlocal ready
        forward()
        mujoco.mj_step2(model, data)
        ready = False

    sim.forward, sim.step = forward, step  # in front of the methods of the class
    try:
        yield
    finally:
        del sim.forward, sim.step


Vector = NDArray[np.float64]

STANDSTILL = np.array([0, 0, 0, 0, 0, 0, -1], np.float64)
"""The action that moves nothing and keeps the gripper open."""


class LiberoSimulator:
    """What LIBERO's own environment does, with two differences.

    Images are drawn when `observe` is called, from the moment that robosuite's sensors looked at (it is up to a
    control step before the end of the last one). And a reset depends on its arguments alone: LIBERO's adds one more
    draw per earlier reset in tasks with drawers and switches, so that furniture stands elsewhere each time.
    """

    def __init__(self, task: LiberoTask, settings: SimulatorSettings) -> None:
        import_libero()
        from libero.libero.envs.env_wrapper import ControlEnv

        from armature.components.robots.libero.cameras import Cameras
        from armature.components.robots.libero.control import kept_models

        self.task, self._settings = task, settings
        self._assets = assets_folder(settings.assets == "compact")
        use_assets(self._assets)
        self._states = load_initial_states(task, settings.trusted_initial_states)
        with kept_models():
            self._control = ControlEnv(
                bddl_file_name=str(task.bddl_file),
                control_freq=settings.control_freq,
                use_camera_obs=False,
                has_offscreen_renderer=False,
                ignore_done=True,
            )
        self._environment = self._control.env
        self._cameras = Cameras(
            list(settings.camera_name_mapping), settings.resolution, settings.reflections, settings.offscreen_samples
        )
        self._shown: Any = None
        self._looks: Any = None
        self._moment: Any = None
        self._words = task.language
        self.observed: dict[str, Any] = {}
        """Positions and poses of the robot and all objects, as robosuite's sensors saw them last."""
        self._watch()

    def reset(self, initial_state: int, seed: int, perturbation: Perturbation | None = None) -> None:
        """Stored state `initial_state` (modulo their number), after the steps without motion.

        Args:
            seed: Where fixtures stand is drawn from it, which is not part of a stored state, and how it is perturbed.
        """
        from robosuite.utils.errors import RandomizationError

        from armature.components.robots.libero.control import kept_models, quicken, restore
        from armature.components.robots.libero.perturbations.apply import Perturber

        environment, perturber = self._environment, Perturber(perturbation, self.task, seed)
        use_assets(self._assets)
        restore(environment)
        environment.seed(seed)
        while True:  # LIBERO's wrapper tries again whatever is raised, also where no try can succeed
            environment.object_property_initializers.clear()
            try:
                with kept_models() as compiled:
                    environment.reset()
                break
            except RandomizationError:
                continue
        quicken(environment)
        self._looks = None if perturber.change_sight(environment) else compiled.model
        self._words = perturber.words(self.task.language)
        self.observed = self._control.set_init_state(self._states[initial_state % len(self._states)])
        self._wait()
        if perturber.change_places(environment):
            self.observed = self._control.set_init_state(self._control.get_sim_state())
            self._wait()

    def _wait(self) -> None:
        for _ in range(self._settings.num_steps_wait):
            self._advance(STANDSTILL)

    def observe(self) -> RobotObservation:
        """Two cameras at 256 pixels take a second of one core: ask for what is needed."""
        model = self._environment.sim.model._model
        if self._shown is not model:
            self._cameras.show(model, self._looks)
            self._shown = model
        drawn = self._cameras.draw(self._moment)
        names = self._settings.camera_name_mapping
        images = {f"{IMAGES}{names[camera]}": image for camera, image in drawn.items()}
        return RobotObservation(images, robot_state(self.observed), self._words)

    def step(self, action: NDArray[np.floating[Any]]) -> bool:
        """Carry out one action; whether the goal holds now, or `reach_distance` is undercut.

        Raises:
            DataError: it is not seven finite numbers.
        """
        if np.shape(action) != (len(ACTION_NAMES),) or not np.isfinite(action).all():
            raise DataError(
                f"the action {np.asarray(action).tolist()!r:.200} is not {len(ACTION_NAMES)} finite numbers",
                code="invalid_action",
                where=f"{self.task.suite}, task {self.task.index}",
            )
        success = self._advance(np.asarray(action, np.float64))
        return self._reached() if self.reaching else success

    def _advance(self, action: Vector) -> bool:
        """Whether the goal of the task's file holds afterwards."""
        with one_pass(self._environment.sim):
            self.observed, _, success, _ = self._environment.step(action)
        return bool(success)

    def progress(self) -> list[GoalProgress]:
        """Of each predicate of the goal, as the simulation is now."""
        reached = self._reached() if self.reaching else None
        return goal_progress(self._environment, self.goal, self.observed["robot0_eef_pos"], reached)

    def _reached(self) -> bool:
        distance = self._settings.reach_distance
        way = self.observed[f"{self.goal[0][1]}_pos"] - self.observed["robot0_eef_pos"]
        return distance is not None and float(np.linalg.norm(way)) < distance

    @property
    def reaching(self) -> bool:
        """Whether the episode ends when the gripper is near the object."""
        return self._settings.reach_distance is not None

    @property
    def goal(self) -> list[list[str]]:
        """Predicates, as the task's file has them: [["on", "akita_black_bowl_1", "plate_1"]]."""
        goal: list[list[str]] = self._environment.parsed_problem["goal_state"]
        return goal

    def site(self, name: str) -> Vector:
        """Where a place marked on an object or a fixture is, in meters."""
        return np.array(self._environment.sim.data.get_site_xpos(name))

    def body(self, name: str) -> tuple[Any, Any, int]:
        """MuJoCo's model and data, and the number of an object's root body in them."""
        sim = self._environment.sim
        return sim.model._model, sim.data._data, int(self._environment.obj_body_id[name])

    def close(self) -> None:
        self._cameras.close()
        self._control.close()

    def _watch(self) -> None:
        """Keep the moment that robosuite's sensors look at: one more sensor, that sees everything."""
        import mujoco
        from robosuite.utils.observables import Observable, sensor

        kept: list[Any] = [None]

        @sensor(modality="moment")
        def moment(_: Any) -> NDArray[np.float64]:
            sim = self._environment.sim
            model = sim.model._model
            if kept[0] is not model:  # a reset compiles the model again
                kept[0], self._moment = model, mujoco.MjData(model)
            mujoco.mj_copyData(self._moment, model, sim.data._data)
            return np.zeros(1)

        observable = Observable("moment", moment, sampling_rate=self._settings.control_freq)
        self._environment.add_observable(observable)


def robot_state(observed: dict[str, Any]) -> NDArray[np.float32]:
    """(8,): position of the gripper, its rotation as axis times angle, positions of its two fingers.

    The angle is 2 acos(w), up to a whole turn: quaternions q and -q are one rotation but two states, as in the
    datasets.
    """
    x, y, z, w = np.asarray(observed["robot0_eef_quat"], np.float64)
    w = min(1.0, max(-1.0, w))
    length = math.sqrt(max(0.0, 1.0 - w * w))
    rotation = np.zeros(3) if length <= 1e-10 else np.array([x, y, z]) * (2.0 * math.acos(w) / length)
    parts = [observed["robot0_eef_pos"], rotation, observed["robot0_gripper_qpos"]]
    return np.concatenate(parts).astype(np.float32)
