"""Worker process with simulators, started by `SimulatorProcess`."""

from __future__ import annotations

import gc
from collections.abc import Generator
from dataclasses import asdict
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from armature.components.machine.resources import exempt_from_collection
from armature.components.machine.workers.channel import WorkerError, serve
from armature.components.robots.libero.package import compile_once, import_libero
from armature.components.robots.libero.settings import Perturbation, SimulatorSettings
from armature.components.robots.libero.tasks import suite_tasks

if TYPE_CHECKING:
    from armature.components.robots.libero.simulator import LiberoSimulator


class SimulatorWorker:
    """One simulator per slot. A slot that gets another task needs a new simulator, which takes seconds to build."""

    def __init__(self, broken_starts: bool, **settings: Any) -> None:
        self._settings, self._broken_starts = SimulatorSettings.model_validate(settings), broken_starts
        self._simulators: dict[int, LiberoSimulator] = {}

    def reset(
        self, slot: int, suite: str, index: int, initial_state: int, seed: int, changed: dict[str, Any] | None
    ) -> dict[str, Any]:
        """Reset a slot and return its first observation. changed: the fields of a `Perturbation`, or None."""
        simulator = self._simulator(slot, suite, index)
        simulator.reset(initial_state, seed, None if changed is None else Perturbation(**changed))
        return vars(simulator.observe())

    def step(
        self, slot: int, actions: NDArray[np.float32], film: bool
    ) -> Generator[dict[str, NDArray[np.uint8]], None, dict[str, Any]]:
        """Execute the actions in a slot until one of them solves the task.

        Yields the camera images before each action, or an empty dict if `film` is False. Returns the fields of a
        `StepReply`.
        """
        simulator, success, steps = self._stepped(slot), False, 0
        for action in actions:
            yield dict(simulator.observe().images) if film else {}
            success, steps = simulator.step(action), steps + 1
            if success:
                break
        return {"observation": vars(simulator.observe()), "success": success, "steps": steps}

    def progress(self, slot: int) -> list[dict[str, Any]]:
        """Return the progress of each goal predicate in a slot, as the fields of a `GoalProgress`."""
        return [asdict(goal) for goal in self._stepped(slot).progress()]

    def demonstrate(
        self, suite: str, index: int, initial_state: int, seed: int, noise: float, limit: int
    ) -> Generator[dict[str, Any], None, dict[str, Any]]:
        """Play an episode with the scripted policy in slot 0.

        Yields the fields of a `TakenStep` before each step. Returns the fields of the `DemonstrationOutcome`.
        """
        from armature.components.robots.libero.scripted.policy import DemonstrationOutcome, demonstrate

        for each in demonstrate(self._simulator(0, suite, index), initial_state, seed, noise, limit):
            if isinstance(each, DemonstrationOutcome):
                return asdict(each)
            observation, action = each
            yield {"observation": vars(observation), "action": action}
        raise AssertionError("a demonstration ends with its outcome")

    def _stepped(self, slot: int) -> LiberoSimulator:
        if slot not in self._simulators:
            raise WorkerError(
                "the simulator of the slot is gone, because its process was restarted",
                code="simulator_lost",
                where=f"slot {slot}",
                remedy="reset the slot first",
            )
        return self._simulators[slot]

    def _simulator(self, slot: int, suite: str, index: int) -> LiberoSimulator:
        from armature.components.robots.libero.simulator import LiberoSimulator

        task, current = suite_tasks(suite)[index], self._simulators.get(slot)
        if current is None or current.task != task:
            if current is not None:
                del self._simulators[slot]
                current.close()
            _overlook_modules()
            current = self._simulators[slot] = LiberoSimulator(task, self._settings, self._broken_starts)
            compile_once(partial(current.reset, 0, 0))
        return current

    def close(self) -> None:
        """Close all simulators."""
        for simulator in self._simulators.values():
            simulator.close()


def _overlook_modules() -> None:
    """Exempt all objects of imported modules from garbage collection.

    robosuite runs a collection at each reset, which would scan them every time.
    """
    import_libero()
    import_module("libero.libero.envs.env_wrapper")
    if not gc.get_freeze_count():
        exempt_from_collection()


if __name__ == "__main__":
    serve(SimulatorWorker)
