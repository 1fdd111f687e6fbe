"""Simulation of one LIBERO task: reset to a stored initial state, steps by actions, camera images."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from armature.components.contracts.errors import DataError
from armature.components.contracts.robots import RobotObservation
from armature.components.robots.libero.package import assets_folder, import_libero, use_assets
from armature.components.robots.libero.pro import register_variants
from armature.components.robots.libero.progress import GoalProgress, goal_progress
from armature.components.robots.libero.settings import IMAGES, Perturbation, SimulatorSettings
from armature.components.robots.libero.starts import LOWERING, REST, BodyPose, broken_start, lowered, object_poses
from armature.components.robots.libero.tasks import ACTION_NAMES, LiberoTask, load_initial_states

if TYPE_CHECKING:
    from armature.components.robots.libero.perturbations.apply import Perturber

# --- One pass of forward dynamics per physics step, where robosuite computes three; results are bit-identical ---


@contextmanager
def one_pass(sim: Any) -> Iterator[None]:
    """Context in which each physics step of robosuite's `sim` has one pass of forward dynamics.

    Before a step, robosuite computes the full forward dynamics twice: for itself and for the controller, which reads
    positions, velocities, Jacobians and masses. `mj_step` then starts with a third pass, with the new controls.
    `mj_step1` is the part that does not depend on controls, and `mj_step2` is the rest; together they equal `mj_step`
    according to MuJoCo's documentation. The exception is the integrator RK4, for which nothing is changed here.

    Between `sim.forward` and `sim.step` only controls may be changed.
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

    sim.forward, sim.step = forward, step  # instance attributes that hide the methods of the class
    try:
        yield
    finally:
        del sim.forward, sim.step


Vector = NDArray[np.float64]

STANDSTILL = np.array([0, 0, 0, 0, 0, 0, -1], np.float64)
"""Action that does not move the arm and keeps the gripper open."""


class LiberoSimulator:
    """LIBERO's environment with three differences.

    Images are rendered only when `observe` is called. They show the time of robosuite's last sensor update, which is up
    to one control step before the end of the last action. A reset depends only on its arguments: LIBERO's own reset
    also depends on the number of earlier resets in tasks with drawers and switches, which moves their furniture. And
    an episode begins as its task says, see `reset`.
    """

    def __init__(self, task: LiberoTask, settings: SimulatorSettings, broken_starts: bool = False) -> None:
        """Build the environment.

        Args:
            broken_starts: do not raise an error if an episode does not begin as its task says.
        """
        import_libero()
        from libero.libero.envs.env_wrapper import ControlEnv

        register_variants()

        from armature.components.robots.libero.cameras import Cameras
        from armature.components.robots.libero.control import kept_models

        self.task, self._settings, self._broken_starts = task, settings, broken_starts
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
        """Positions and poses of the robot and all objects at robosuite's last sensor update."""
        self.stored: dict[str, BodyPose] = {}
        """Poses of the objects in the stored state of the last reset, before they came to rest."""
        self._watch()

    def reset(self, initial_state: int, seed: int, perturbation: Perturbation | None = None) -> None:
        """Reset to stored state number `initial_state` (modulo their number) and wait `num_steps_wait` steps.

        If an object has then fallen off its place, the reset is repeated, and objects sink to their places instead of
        falling. With fewer than 10 waiting steps objects still move, and nothing is checked.

        Args:
            seed: seed of the positions of fixtures, which a stored state does not contain, and of the perturbation.

        Raises:
            DataError: objects are not where the stored state and the task's BDDL file say, or the goal holds already.
        """
        perturber, broken = self._settle(initial_state, seed, perturbation)
        if broken:
            perturber, broken = self._settle(initial_state, seed, perturbation, lower=True)
        if broken and not self._broken_starts:
            raise DataError(
                f"the episode does not begin as its task says: {'; '.join(broken)}",
                code="broken_start",
                where=f"{self.task.suite}, task {self.task.index}, initial state {initial_state}",
                remedy="leave this task or this initial state out, or set play_broken_starts = true to play it",
            )
        if perturber.change_places(self._environment):
            self.observed = self._control.set_init_state(self._control.get_sim_state())
            self._wait(self._settings.num_steps_wait)

    def _settle(
        self, initial_state: int, seed: int, perturbation: Perturbation | None = None, lower: bool = False
    ) -> tuple[Perturber, list[str]]:
        """Reset to a stored state and let objects come to rest. Return the episode's perturber and `broken_start`.

        lower: objects sink to their places, in further steps before the `num_steps_wait` steps.
        """
        perturber = self._restore(initial_state, seed, perturbation)
        self.stored = object_poses(self._environment)
        if lower:
            with lowered(self._environment.sim.model._model):
                self._wait(LOWERING)
        waits = self._settings.num_steps_wait
        self._wait(waits)
        return perturber, broken_start(self._environment, self.stored) if waits >= REST else []

    def _restore(self, initial_state: int, seed: int, perturbation: Perturbation | None) -> Perturber:
        """Reset to a stored state, in which objects are still in the air. Return the episode's perturber."""
        from robosuite.utils.errors import RandomizationError

        from armature.components.robots.libero.control import kept_models, quicken, restore
        from armature.components.robots.libero.perturbations.apply import Perturber

        environment, perturber = self._environment, Perturber(perturbation, self.task, seed)
        use_assets(self._assets)
        restore(environment)
        environment.seed(seed)
        while True:  # unlike LIBERO's wrapper, which repeats after any error, even if no attempt can succeed
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
        return perturber

    def _wait(self, steps: int) -> None:
        for _ in range(steps):
            self._advance(STANDSTILL)

    def observe(self) -> RobotObservation:
        """Return the current observation. Rendering two cameras at 256 pixels takes a second of one core."""
        model = self._environment.sim.model._model
        if self._shown is not model:
            self._cameras.show(model, self._looks)
            self._shown = model
        drawn = self._cameras.draw(self._moment)
        names = self._settings.camera_name_mapping
        images = {f"{IMAGES}{names[camera]}": image for camera, image in drawn.items()}
        return RobotObservation(images, robot_state(self.observed), self._words)

    def step(self, action: NDArray[np.floating[Any]]) -> bool:
        """Execute one action. Return True if the task's goal holds now.

        With `reach_distance`, the goal is that the gripper is within that distance of the task's object.

        Raises:
            DataError: the action is not seven finite numbers.
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
        """Execute one action. Return True if the goal of the task's BDDL file holds now."""
        with one_pass(self._environment.sim):
            self.observed, _, success, _ = self._environment.step(action)
        return bool(success)

    def progress(self) -> list[GoalProgress]:
        """Return the current progress of each goal predicate."""
        reached = self._reached() if self.reaching else None
        return goal_progress(self._environment, self.goal, self.observed["robot0_eef_pos"], reached)

    def _reached(self) -> bool:
        distance = self._settings.reach_distance
        way = self.observed[f"{self.goal[0][1]}_pos"] - self.observed["robot0_eef_pos"]
        return distance is not None and float(np.linalg.norm(way)) < distance

    @property
    def reaching(self) -> bool:
        """True if the episode ends when the gripper is near the object."""
        return self._settings.reach_distance is not None

    @property
    def goal(self) -> list[list[str]]:
        """Goal predicates as in the task's BDDL file: [["on", "akita_black_bowl_1", "plate_1"]]."""
        goal: list[list[str]] = self._environment.parsed_problem["goal_state"]
        return goal

    def site(self, name: str) -> Vector:
        """Return the position in meters of a site, a marked point on an object or a fixture."""
        return np.array(self._environment.sim.data.get_site_xpos(name))

    def body(self, name: str) -> tuple[Any, Any, int]:
        """Return MuJoCo's model and data, and the number of an object's root body in them."""
        sim = self._environment.sim
        return sim.model._model, sim.data._data, int(self._environment.obj_body_id[name])

    def close(self) -> None:
        """Free the cameras and the environment."""
        self._cameras.close()
        self._control.close()

    def _watch(self) -> None:
        """Add a sensor that copies the whole state when robosuite updates its sensors, for rendering later."""
        import mujoco
        from robosuite.utils.observables import Observable, sensor

        copied: list[Any] = [None]

        @sensor(modality="moment")
        def moment(_: Any) -> NDArray[np.float64]:
            sim = self._environment.sim
            model = sim.model._model
            if copied[0] is not model:  # a reset creates a new model
                copied[0], self._moment = model, mujoco.MjData(model)
            mujoco.mj_copyData(self._moment, model, sim.data._data)
            return np.zeros(1)

        observable = Observable("moment", moment, sampling_rate=self._settings.control_freq)
        self._environment.add_observable(observable)


def robot_state(observed: dict[str, Any]) -> NDArray[np.float32]:
    """Return the robot's state, (8,): gripper position, its rotation as axis times angle, positions of both fingers.

    The angle is 2 acos(w), up to a full turn: the quaternions q and -q are the same rotation but two states, as in the
    datasets.
    """
    x, y, z, w = np.asarray(observed["robot0_eef_quat"], np.float64)
    w = min(1.0, max(-1.0, w))
    length = math.sqrt(max(0.0, 1.0 - w * w))
    rotation = np.zeros(3) if length <= 1e-10 else np.array([x, y, z]) * (2.0 * math.acos(w) / length)
    parts = [observed["robot0_eef_pos"], rotation, observed["robot0_gripper_qpos"]]
    return np.concatenate(parts).astype(np.float32)
