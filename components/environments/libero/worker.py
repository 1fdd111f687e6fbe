"""A process with simulators in it: requests and answers over a pipe, both pickled by our own two sides.

A request is (method, arguments). Its answers are any number of ("part", value), then ("done", value),
("refused", error) of ours, or ("failed", text). The process ends when the pipe does, or when its parent has gone.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from components.contracts.errors import ArmatureError
from components.environments.libero.processes import SimulatorError
from components.environments.libero.settings import SimulatorSettings
from components.environments.libero.tasks import LiberoTask

if TYPE_CHECKING:
    from components.environments.libero.simulator import LiberoSimulator

_PARENT_CHECK = 2.0  # seconds


class SimulatorWorker:
    """Simulators by slot. A slot is built again when it gets another task, which takes seconds."""

    def __init__(self, settings: SimulatorSettings) -> None:
        self._settings = settings
        self._simulators: dict[int, LiberoSimulator] = {}

    def reset(self, slot: int, task: LiberoTask, initial_state: int, seed: int) -> Iterator[Any]:
        """The first observation."""
        simulator = self._simulator(slot, task)
        simulator.reset(initial_state, seed)
        yield simulator.observe()

    def step(self, slot: int, actions: NDArray[np.float32], film: bool) -> Iterator[Any]:
        """Each action's images before it, if they are wanted; at last the observation, success and steps."""
        if slot not in self._simulators:
            raise SimulatorError(
                "the process was started again and the slot's simulator is gone",
                where=f"slot {slot}",
                remedy="reset comes first",
            )
        simulator, success, steps = self._simulators[slot], False, 0
        for action in actions:
            yield simulator.observe().images if film else None
            success, steps = simulator.step(action), steps + 1
            if success:
                break
        yield simulator.observe(), success, steps

    def demonstrate(
        self, slot: int, task: LiberoTask, initial_state: int, seed: int, noise: float, limit: int
    ) -> Iterator[Any]:
        """Each step's (observation, action) before it is taken; at last how it ended."""
        from components.environments.libero.scripted.demonstrate import demonstrate

        yield from demonstrate(self._simulator(slot, task), initial_state, seed, noise, limit)

    def close(self) -> None:
        for simulator in self._simulators.values():
            simulator.close()
        self._simulators.clear()

    def _simulator(self, slot: int, task: LiberoTask) -> LiberoSimulator:
        from components.environments.libero.simulator import LiberoSimulator

        current = self._simulators.get(slot)
        if current is None or current.task != task:
            if current is not None:
                del self._simulators[slot]
                current.close()
            current = self._simulators[slot] = LiberoSimulator(task, self._settings)
        return current


def serve(pipe: Connection, worker: SimulatorWorker, parent: int) -> None:
    while True:
        while not pipe.poll(_PARENT_CHECK):
            if os.getppid() != parent:
                return
        method, arguments = pipe.recv()
        try:
            for last, value in list_last(getattr(worker, method)(*arguments)):
                pipe.send(("done" if last else "part", value))
        except ArmatureError as error:
            pipe.send(("refused", error))
        except Exception as error:  # of MuJoCo, robosuite and LIBERO, which raise anything
            pipe.send(("failed", f"{type(error).__name__}: {error}"[:4000]))


def list_last(values: Iterator[Any]) -> Iterator[tuple[bool, Any]]:
    """Each value as soon as it is there, but the last one, which is known when the next is missing."""
    held = next(values)
    for value in values:
        yield False, held
        held = value
    yield True, held


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent too, which decides
    os.dup2(2, 1)  # LIBERO and MuJoCo print
    with Connection(int(sys.argv[1])) as pipe:
        worker = SimulatorWorker(pipe.recv())
        with suppress(EOFError, BrokenPipeError):
            serve(pipe, worker, int(sys.argv[2]))
        worker.close()


if __name__ == "__main__":
    main()
