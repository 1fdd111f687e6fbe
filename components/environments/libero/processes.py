"""Simulators in processes of their own: MuJoCo and a driver that crash or hang take no run with them."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from components.contracts.errors import ArmatureError
from components.contracts.robots import RobotObservation
from components.environments.libero.scripted.demonstrate import DemonstrationOutcome
from components.environments.libero.settings import SimulatorSettings
from components.environments.libero.tasks import LiberoTask

JobT = TypeVar("JobT")
ResultT = TypeVar("ResultT")


class SimulatorError(ArmatureError):
    """A simulator failed, hung, or its process died: all simulators of the process are gone. Or one is gone since."""


@dataclass(frozen=True)
class ChunkResult:
    """What became of a chunk of actions.

    observation: After the last action that was carried out.
    success: The goal holds; later actions of the chunk were left out.
    steps: How many were carried out.
    frames: The images before each of them, by camera, if they were asked for.
    """

    observation: RobotObservation
    success: bool
    steps: int
    frames: list[dict[str, NDArray[np.uint8]]]


@dataclass(frozen=True)
class Demonstration:
    """Steps of (what was seen, the action taken then), and how it ended."""

    steps: list[tuple[RobotObservation, NDArray[np.float32]]]
    outcome: DemonstrationOutcome


class SimulatorProcess:
    """One child with simulators by slot. It starts with the first request, and again with the first after an end.

    Safe to share between threads, which wait for one another.
    """

    def __init__(self, settings: SimulatorSettings, timeout: float) -> None:
        """
        Args:
            timeout: Seconds for one reset, one step of a demonstration or one chunk's action.
        """
        self._settings, self._timeout = settings, timeout
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe: Connection | None = None
        self._lock = threading.Lock()
        self.starts = 0
        """How many children there have been."""

    @property
    def pid(self) -> int | None:
        """Of the child, if there is one."""
        return self._process.pid if self._process is not None else None

    @property
    def restarts(self) -> int:
        return max(0, self.starts - 1)

    def reset(self, task: LiberoTask, initial_state: int, seed: int, slot: int = 0) -> RobotObservation:
        """As `LiberoSimulator.reset`; builds the simulator where the slot has another task.

        Raises:
            SimulatorError: it failed.
        """
        observation: RobotObservation
        (observation,) = self._ask("reset", slot, task, initial_state, seed)
        return observation

    def step(self, actions: NDArray[np.float32], slot: int = 0, film: bool = False) -> ChunkResult:
        """Carry out actions (n, 7) until one succeeds; `film` keeps all images.

        Raises:
            SimulatorError: it failed, or the slot has had no reset since its process started.
        """
        *frames, (observation, success, steps) = self._ask("step", slot, actions, film)
        return ChunkResult(observation, success, steps, frames if film else [])

    def demonstrate(self, task: LiberoTask, initial_state: int, seed: int, noise: float, limit: int) -> Demonstration:
        """As `demonstrate.demonstrate`, in slot 0.

        Raises:
            SimulatorError: it failed.
        """
        *steps, outcome = self._ask("demonstrate", 0, task, initial_state, seed, noise, limit)
        return Demonstration(steps, outcome)

    def close(self) -> None:
        """End the child; the next request starts another. Waits for the request in flight."""
        with self._lock:
            self._end()

    def __enter__(self) -> SimulatorProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _ask(self, method: str, *arguments: Any) -> list[Any]:
        with self._lock:
            if self._process is None:
                if method == "step":
                    raise SimulatorError("the process ended, and its simulators with it", remedy="reset comes first")
                self._start()
            assert self._process is not None and self._pipe is not None
            process, pipe, told = self._process, self._pipe, False
            where = f"process {process.pid}, {method} of {_named(arguments)}"
            try:
                pipe.send((method, arguments))
                answers = []
                while True:
                    if not pipe.poll(self._timeout):
                        raise SimulatorError(f"no answer within {self._timeout:g} s", where=where)
                    kind, value = pipe.recv()
                    if kind == "refused":
                        told = True
                        raise value
                    if kind == "failed":
                        raise SimulatorError(f"the simulator failed: {value}", where=where)
                    answers.append(value)
                    if kind == "done":
                        told = True
                        return answers
            except (EOFError, OSError) as error:
                self._end()
                raise SimulatorError(f"the process ended with code {process.returncode}", where=where) from error
            finally:
                if not told:
                    self._end()

    def _start(self) -> None:
        root = Path(__file__).parents[3]
        paths = [str(root), *filter(None, [os.environ.get("PYTHONPATH")])]
        self._pipe, theirs = multiprocessing.Pipe()
        environment = {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "components.environments.libero.worker", str(theirs.fileno()), str(os.getpid())],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env={**os.environ, **environment},
            )
        self._pipe.send(self._settings)
        self.starts += 1

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        assert self._pipe is not None
        self._pipe.close()
        try:
            process.wait(_GRACE)  # it frees its GL contexts when the pipe ends
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


class SimulatorPool:
    """Processes that are kept until `close`, and jobs done with them."""

    def __init__(self, settings: SimulatorSettings, processes: int, timeout: float) -> None:
        self.processes = tuple(SimulatorProcess(settings, timeout) for _ in range(processes))

    def map(
        self,
        jobs: Sequence[JobT],
        work: Callable[[SimulatorProcess, JobT], ResultT],
        key: Callable[[JobT], Hashable],
        attempts: int,
    ) -> Iterator[tuple[JobT, ResultT]]:
        """`work` of every job, in threads, as they are done; the order of `jobs` within a key.

        A process keeps to the jobs of one key while there are any, since another task costs seconds. A job whose
        simulator failed is tried again, `attempts` times in all.

        Raises:
            SimulatorError: a job's last attempt failed. Other errors of `work` are raised as they are.
        """
        queue = _Queue(jobs, key)
        done: SimpleQueue[tuple[JobT, ResultT] | BaseException | None] = SimpleQueue()

        def run(process: SimulatorProcess) -> None:
            try:
                last: Hashable = None
                while (taken := queue.take(last)) is not None:
                    last, job = taken
                    done.put((job, _attempt(work, process, job, attempts)))
                done.put(None)
            except BaseException as error:
                done.put(error)

        threads = [threading.Thread(target=run, args=(process,), daemon=True) for process in self.processes]
        for thread in threads:
            thread.start()
        try:
            left = len(threads)
            while left:
                result = done.get()
                if result is None:
                    left -= 1
                elif isinstance(result, BaseException):
                    raise result
                else:
                    yield result
        finally:
            queue.clear()
            for thread in threads:
                thread.join()

    def close(self) -> None:
        for process in self.processes:
            process.close()

    def __enter__(self) -> SimulatorPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Queue(Generic[JobT]):
    """Jobs by key; a new taker gets the key with most jobs left per taker."""

    def __init__(self, jobs: Sequence[JobT], key: Callable[[JobT], Hashable]) -> None:
        self._left: dict[Hashable, list[JobT]] = {}
        for job in jobs:
            self._left.setdefault(key(job), []).append(job)
        self._takers: dict[Hashable, int] = dict.fromkeys(self._left, 0)
        self._lock = threading.Lock()

    def take(self, last: Hashable) -> tuple[Hashable, JobT] | None:
        """The next job of `last`, or of another key once that has none."""
        with self._lock:
            if not self._left.get(last):
                if last in self._takers:
                    self._takers[last] -= 1
                waiting = [key for key, jobs in self._left.items() if jobs]
                if not waiting:
                    return None
                last = max(waiting, key=lambda key: len(self._left[key]) / (1 + self._takers[key]))
                self._takers[last] += 1
            return last, self._left[last].pop(0)

    def clear(self) -> None:
        with self._lock:
            self._left.clear()


def _attempt(
    work: Callable[[SimulatorProcess, JobT], ResultT], process: SimulatorProcess, job: JobT, attempts: int
) -> ResultT:
    for attempt in range(1, attempts + 1):
        try:
            return work(process, job)
        except SimulatorError:
            if attempt == attempts:
                raise
    raise AssertionError("attempts is positive")


def _named(arguments: tuple[Any, ...]) -> str:
    parts = [f"{each.suite} task {each.index}" if isinstance(each, LiberoTask) else each for each in arguments]
    return ", ".join(str(part) for part in parts if not isinstance(part, np.ndarray))


_GRACE = 3.0  # seconds
