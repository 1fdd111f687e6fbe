"""Stand-ins for simulator and policy: a point that moves in a plane, and a policy without a model."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from armature.components.contracts.robots import RobotObservation
from armature.components.machine.workers.channel import WorkerError
from armature.components.robots.evaluation.settings import LiberoEvaluationSettings
from armature.components.robots.libero.processes import ChunkResult
from armature.components.robots.libero.progress import GoalProgress
from armature.components.robots.libero.settings import Perturbation
from armature.components.robots.libero.tasks import LiberoTask

TASKS = [LiberoTask("libero_spatial", i, f"task_{i}", f"reach number {i}", 5, "") for i in range(3)]


def settings(**changes: Any) -> LiberoEvaluationSettings:
    values: dict[str, Any] = {
        "suites": ("libero_spatial",),
        "episodes_per_task": 7,
        "max_steps": {"libero_spatial": 23},
        "batch": 1,
        "rows_per_pass": 1,
        "videos_per_task": 1,
    }
    return LiberoEvaluationSettings(**{**values, **changes})


class Plane:
    """Simulator of a point that must reach the origin: the first two numbers of an action push it.

    deaths: numbers of steps, counted over all slots, at which the process dies with all its slots. Calls of threads
    that share it run one after the other, as in a simulator's process.
    """

    def __init__(self, deaths: Sequence[int] = ()) -> None:
        self._points: dict[int, NDArray[np.float64]] = {}
        self._tasks: dict[int, LiberoTask] = {}
        self._deaths, self.steps, self.resets = set(deaths), 0, 0
        self._lock = threading.Lock()

    def reset(
        self,
        task: LiberoTask,
        initial_state: int,
        seed: int,
        slot: int = 0,
        perturbation: Perturbation | None = None,
    ) -> RobotObservation:
        """Put the point at its start. With a perturbation, the start is farther from the origin."""
        with self._lock:
            self.resets += 1
            angle = 1 + 7 * task.index + initial_state + seed / 1000
            way = 2.0 if perturbation is None else 2 + perturbation.strength
            self._points[slot], self._tasks[slot] = way * np.array([np.cos(angle), np.sin(angle)]), task
            return self._observe(slot)

    def progress(self, slot: int = 0) -> list[GoalProgress]:
        way = float(np.linalg.norm(self._points[slot]))
        return [GoalProgress(holds=way < 0.15, reach=way, grasped=False, place=None)]

    def step(self, actions: NDArray[np.float32], slot: int = 0, film: bool = False) -> ChunkResult:
        with self._lock:
            return self._carry_out(actions, slot, film)

    def _carry_out(self, actions: NDArray[np.float32], slot: int, film: bool) -> ChunkResult:
        self.steps += 1
        if self.steps in self._deaths:
            self._points.clear()
        if slot not in self._points:
            raise WorkerError("the process of the plane died")
        frames = []
        for steps, action in enumerate(actions, start=1):
            if film:
                frames.append(dict(self._observe(slot).images))
            self._points[slot] = self._points[slot] + 0.2 * action[:2]
            if (success := bool(np.linalg.norm(self._points[slot]) < 0.15)) or steps == len(actions):
                return ChunkResult(self._observe(slot), success, steps, frames)
        raise AssertionError("no actions")

    def _observe(self, slot: int) -> RobotObservation:
        state = self._points[slot].astype(np.float32)
        image = np.full((16, 16, 3), int(40 * np.linalg.norm(state)), np.uint8)
        images = {"observation.images.image": image, "observation.images.image2": image[::-1]}
        return RobotObservation(images, state, self._tasks[slot].language)


class Homing:
    """Policy that pushes the point toward the origin. The seed of a row determines the noise of the push."""

    n_action_steps = 4
    action_dimensions = 7
    rows_per_pass = 2

    def __init__(self, noise: float = 1.1) -> None:
        self._noise = noise
        self.rows: list[int] = []

    def prepared(self, observation: RobotObservation) -> RobotObservation:
        return observation

    def predict(self, observations: Sequence[RobotObservation], seeds: Sequence[int]) -> NDArray[np.float32]:
        self.rows.append(len(seeds))
        return np.stack([self._row(*each) for each in zip(observations, seeds, strict=True)])

    def _row(self, observation: RobotObservation, seed: int) -> NDArray[np.float32]:
        noise = np.random.default_rng(seed).normal(size=(self.n_action_steps, 7))
        actions = self._noise * noise
        actions[:, :2] -= np.clip(observation.state, -1, 1)
        return actions.astype(np.float32)

    def facts(self) -> dict[str, Any]:
        return {"policy": "homing"}
