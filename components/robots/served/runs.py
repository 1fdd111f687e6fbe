"""Runs of vla-eval that this process starts, in which a policy plays a benchmark.

A run plays the episodes of one task and asks a websocket server of this process for its actions. Only connections with
the run's token in their path are served, on loopback.
"""

from __future__ import annotations

import logging
import os
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from websockets.sync.server import ServerConnection, serve

from armature.components.contracts.errors import ConfigurationError
from armature.components.contracts.installation import home_folder
from armature.components.contracts.metrics import write_json
from armature.components.machine.process import Program
from armature.components.machine.project import project_path
from armature.components.machine.workers.channel import WorkerError
from armature.components.machine.workers.pool import StickyQueue
from armature.components.robots.evaluation.episode import PlayedEpisode
from armature.components.robots.evaluation.robot import SimulatedRobot
from armature.components.robots.evaluation.run import AttemptedEpisode, InferenceQueue
from armature.components.robots.evaluation.schedule import PlannedEpisode
from armature.components.robots.libero.tasks import LiberoTask
from armature.components.robots.served.connection import (
    ERROR,
    HELLO,
    LARGEST_MESSAGE,
    OBSERVATION,
    START,
    BenchmarkConnection,
    BenchmarkMessage,
)
from armature.components.robots.served.films import Attempt, EpisodeFilms
from armature.components.robots.served.settings import (
    BenchmarkEvaluationSettings,
    EvaluateBenchmarkStageSettings,
    ServedBenchmarkSettings,
)

_WEBSOCKETS = logging.getLogger(f"{__name__}.websockets")
_WEBSOCKETS.setLevel(logging.CRITICAL)  # the library logs every failed handshake as an error

Finish = Callable[[PlannedEpisode, AttemptedEpisode[PlayedEpisode]], None]


def benchmark_python(settings: ServedBenchmarkSettings) -> Path:
    """Return the Python interpreter that has vla-eval and the simulator.

    Raises:
        ConfigurationError: it does not exist.
    """
    python = home_folder() / settings.python
    if shutil.which(python) is None:
        raise ConfigurationError(
            "there is no Python interpreter with vla-eval and the simulator",
            code="benchmark_python_missing",
            where=f"benchmark.python, {python}",
            remedy="armature setup --metaworld, or install both in an environment of your own and set benchmark.python",
        )
    return python


def benchmark_folder(settings: ServedBenchmarkSettings) -> Path | None:
    """Return the folder of the benchmark's module; None if the module is installed.

    Raises:
        ConfigurationError: it does not exist.
    """
    folder = project_path(settings.folder) if settings.folder is not None else None
    if folder is not None and not folder.is_dir():
        raise ConfigurationError(
            "the folder of the benchmark's module does not exist",
            code="benchmark_folder_missing",
            where=f"benchmark.folder, {folder.absolute()}",
            remedy=f"name the folder that has the module of {settings.benchmark}; it is relative to the recipe's file",
        )
    return folder


def served_robot(settings: ServedBenchmarkSettings) -> SimulatedRobot:
    """Return the robot of the benchmark."""
    return SimulatedRobot(settings.conventions, settings.cameras, settings.resolution, "benchmark.cameras")


def planned_episodes(benchmark: str, plan: BenchmarkEvaluationSettings) -> list[PlannedEpisode]:
    """Return all episodes, by task and number. The benchmark makes the start of an episode from its number."""
    count = plan.episodes_per_task
    tasks = [LiberoTask(benchmark, i, name, name, count, "") for i, name in enumerate(plan.tasks)]
    return [PlannedEpisode(task, k, k, 0, k, plan.max_steps) for task in tasks for k in range(count)]


@dataclass
class _Run:
    """A run of vla-eval: the episodes of its task that are left, by number, and how it ended.

    lost: number of attempts at its first episode that were lost. heard: time of the latest message. started: an episode
    of the task has started. ended: why its connection was not served to the end. serving: held while it is served.
    """

    task: LiberoTask
    left: dict[int, PlannedEpisode]
    lost: int
    heard: float = field(default_factory=time.monotonic)
    started: bool = False
    ended: BaseException | None = None
    serving: threading.Lock = field(default_factory=threading.Lock)


class BenchmarkPlayer:
    """Plays planned episodes in runs of vla-eval, one task in each. Finished episodes are not played again.

    Args:
        folder: for configurations and logs of the runs.
        processes: maximum number of runs at the same time.
    """

    def __init__(self, settings: EvaluateBenchmarkStageSettings, folder: Path, processes: int) -> None:
        self._benchmark, self._plan = settings.benchmark, settings.evaluation
        self._python, self._source = benchmark_python(self._benchmark), benchmark_folder(self._benchmark)
        self._folder, self._processes = folder, processes
        self.films = EpisodeFilms(folder, self._plan.videos_per_task, self._benchmark.conventions.control_freq)
        self._runs: dict[str, _Run] = {}
        self._lock = threading.Lock()

    def play(
        self, planned: Sequence[PlannedEpisode], queue: InferenceQueue[Any], attempt: Attempt, finish: Finish
    ) -> None:
        """Play all episodes, see `EpisodePlayer.play`."""
        by_task: dict[int, dict[int, PlannedEpisode]] = {}
        for episode in planned:
            by_task.setdefault(episode.task.index, {})[episode.episode] = episode
        tasks = StickyQueue(by_task.values(), id)
        with self._listening(attempt, finish) as url:

            def play_tasks() -> None:
                while (left := tasks.take(None)) is not None:
                    self._play_task(left, url, finish)

            queue.serve([play_tasks] * min(self._processes, self._plan.batch, len(by_task)))

    @contextmanager
    def _listening(self, attempt: Attempt, finish: Finish) -> Iterator[str]:
        # Pings would end a run whose simulator computes for long, because it answers none meanwhile.
        with serve(
            partial(self._serve, attempt, finish),
            "127.0.0.1",
            0,
            origins=[None],  # refuse browsers, which always send an origin
            compression=None,
            max_size=LARGEST_MESSAGE,
            ping_interval=None,
            server_header=None,
            logger=_WEBSOCKETS,
        ) as server:
            thread = threading.Thread(target=server.serve_forever, name="benchmark server", daemon=True)
            thread.start()
            try:
                yield f"ws://127.0.0.1:{server.socket.getsockname()[1]}"
            finally:
                server.shutdown()
                thread.join()

    def _play_task(self, left: dict[int, PlannedEpisode], url: str, finish: Finish) -> None:
        lost = 0
        while left:
            count = len(left)
            problem = self._run(left, lost, url)
            lost = lost + 1 if len(left) == count else 1
            if left and lost == self._plan.attempts:
                given_up, lost = left.pop(min(left)), 0
                with self._lock:
                    finish(given_up, AttemptedEpisode(None, problem, self._plan.attempts, 0.0))

    def _run(self, left: dict[int, PlannedEpisode], lost: int, url: str) -> WorkerError:
        """Play the episodes that are left in one run of vla-eval, and return why some are still left."""
        task = next(iter(left.values())).task
        token, run = secrets.token_urlsafe(16), _Run(task, left, lost)
        self._runs[token] = run
        config, log = (self._folder / f"{task.index}.{ending}" for ending in ("json", "log"))
        self._folder.mkdir(parents=True, exist_ok=True)
        write_json(config, self._config(task, max(left) + 1))
        command: list[str | Path] = [self._python, "-m", "vla_eval.cli.main", "run", "--no-save", "--config", config]
        source = str(self._source) if self._source is not None else None
        env = {"PYTHONPATH": source, "MUJOCO_GL": os.environ.get("MUJOCO_GL", "egl")}
        program = Program([*command, "--server-url", f"{url}/{token}"], log=log, env=env)
        try:
            while program.returncode is None and run.ended is None:
                time.sleep(0.05)
                if not run.serving.locked() and time.monotonic() - run.heard > self._benchmark.timeout_s:
                    run.ended = WorkerError("the benchmark neither connects nor ends", code="benchmark_silent")
        finally:
            status = program.stop()
            with run.serving:  # its connection is closed now
                del self._runs[token]
        if run.ended is not None and not isinstance(run.ended, WorkerError):
            raise run.ended
        if not run.started and status == 0:
            raise ConfigurationError(
                f"the benchmark started no episode of the task {task.name!r}: {program.tail(4)}",
                code="benchmark_started_nothing",
                where=f"evaluation.tasks, {self._benchmark.benchmark}",
                remedy=f"name tasks that the benchmark has, and see {log}",
            )
        why = f"{run.ended.what}; " if run.ended is not None else ""
        return WorkerError(
            f"{why}vla-eval ended with status {status} and {len(left)} episodes left: {program.tail(4)}",
            code="benchmark_run_failed",
            where=f"task {task.name}",
            remedy=f"see {log}",
        )

    def _config(self, task: LiberoTask, episodes: int) -> dict[str, Any]:
        entry = {
            "benchmark": self._benchmark.benchmark,
            "params": self._benchmark.params,
            "tasks": [task.name],
            "episodes_per_task": episodes,
            "max_steps": self._plan.max_steps,
        }
        return {
            "server": {"timeout": self._benchmark.timeout_s},
            "output_dir": str(self._folder / f"vla-eval-{task.index}"),
            "benchmarks": [entry],
        }

    def _serve(self, attempt: Attempt, finish: Finish, connection: ServerConnection) -> None:
        """Serve a connection until it is closed."""
        run = self._runs.get(connection.request.path[1:]) if connection.request is not None else None
        if run is None or not run.serving.acquire(blocking=False):
            return
        try:
            self._converse(BenchmarkConnection(connection, self._benchmark), run, attempt, finish)
        except BaseException as error:
            run.ended = error
        finally:
            run.serving.release()

    def _converse(self, connection: BenchmarkConnection, run: _Run, attempt: Attempt, finish: Finish) -> None:
        while (message := connection.receive()) is not None:
            run.heard = time.monotonic()
            if message.type == HELLO:
                connection.greet(message)
            elif message.type == OBSERVATION:
                connection.answer(message, ERROR, {"error": "this episode is not to be played, or not again"})
            elif message.type == START:
                number = _number(message, run)
                run.started |= number >= 0
                if (planned := run.left.get(number)) is None:
                    continue  # its observation is answered with an error
                lost, run.lost, began = run.lost, 0, time.monotonic()
                played = self.films.play(planned, connection, attempt)
                with self._lock:
                    finish(planned, AttemptedEpisode(played, None, lost, time.monotonic() - began))
                del run.left[planned.episode]
                run.heard = time.monotonic()


def _number(message: BenchmarkMessage, run: _Run) -> int:
    """Return the number of the episode that a message starts; -1 if it is an episode of another task."""
    match message.payload.get("task"):
        case {"name": str() as name, "episode_idx": int() as number} if name == run.task.name:
            return number
    return -1
