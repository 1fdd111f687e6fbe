"""What it takes to play the episodes of a step: seconds of simulators, of the policy, and of keeping what was seen."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

from armature.components.contracts.robots import RobotObservation
from armature.components.environments.libero.perturbations.settings import Perturbation
from armature.components.environments.libero.processes import ChunkResult
from armature.components.environments.libero.progress import GoalProgress
from armature.components.environments.libero.tasks import LiberoTask
from armature.components.evaluation.libero.episode import LostBesideError, SimulatorClient
from armature.components.workers.errors import WorkerError


class PlayTimes:
    """Sums of seconds and counts, over all threads, since they were asked for last."""

    def __init__(self) -> None:
        self._sums: dict[str, float] = defaultdict(float)
        self._lock = threading.Lock()

    @contextmanager
    def measured(self, name: str) -> Iterator[dict[str, float]]:
        """Adds the seconds of the block as `timing/<name>`, and what the block counts; nothing if it raises."""
        began, counted = time.perf_counter(), dict[str, float]()
        yield counted
        counted[f"timing/{name}"] = time.perf_counter() - began
        with self._lock:
            for key, value in counted.items():
                self._sums[key] += value

    def since(self) -> dict[str, float]:
        with self._lock:
            sums, self._sums = self._sums, defaultdict(float)
        return dict(sums)


class TimedSimulators:
    """Simulators of a process, and how long it works for each call: waiting for those of other slots does not count."""

    def __init__(self, arena: SimulatorClient, times: PlayTimes) -> None:
        self._arena, self._times = arena, times
        self._built: dict[int, LiberoTask] = {}
        self._lock = threading.Lock()

    def reset(
        self,
        task: LiberoTask,
        initial_state: int,
        seed: int,
        slot: int = 0,
        perturbation: Perturbation | None = None,
    ) -> RobotObservation:
        """A reset that builds a simulator first is one of `simulator_build`."""
        with self._lock, self._forgotten_when_lost():
            stays = self._built.get(slot) == task
            with self._times.measured("simulator_reset" if stays else "simulator_build") as counted:
                seen = self._arena.reset(task, initial_state, seed, slot, perturbation)
                counted["simulator/resets" if stays else "simulator/builds"] = 1
            self._built[slot] = task
        return seen

    def step(self, actions: NDArray[np.float32], slot: int = 0, film: bool = False) -> ChunkResult:
        with self._standing(slot), self._times.measured("simulator_step") as counted:
            carried = self._arena.step(actions, slot, film)
            counted["simulator/actions"] = carried.steps
        return carried

    def progress(self, slot: int = 0) -> list[GoalProgress]:
        with self._standing(slot):
            return self._arena.progress(slot)

    @contextmanager
    def _standing(self, slot: int) -> Iterator[None]:
        with self._lock:
            if slot not in self._built:
                raise LostBesideError("the simulator's process was lost in an episode that was played beside this one")
            with self._forgotten_when_lost():
                yield

    @contextmanager
    def _forgotten_when_lost(self) -> Iterator[None]:
        try:
            yield
        except WorkerError:
            self._built.clear()
            raise
