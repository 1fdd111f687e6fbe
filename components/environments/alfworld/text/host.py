"""Worker processes that play text games, and a client for each game."""

from __future__ import annotations

import itertools
import threading
from contextlib import suppress
from typing import Annotated
from weakref import WeakValueDictionary, finalize

from pydantic import Field, TypeAdapter

from armature.components.environments.alfworld import packaged
from armature.components.machine.workers.channel import WorkerError
from armature.components.machine.workers.pool import WorkerPool
from armature.components.machine.workers.requests import NOTHING, ReplyForm
from armature.components.machine.workers.worker import Worker, current_cluster, make_worker

ANSWER_SECONDS = 300.0
"""Seconds to wait for a process's answer. A process that takes longer is ended, and its games are lost."""

MOST_BYTES = 2**24
"""Largest number of bytes in the answer to one command."""

WORKER = "armature.components.environments.alfworld.text.worker"


class EngineReply(ReplyForm):
    """The engine's answer to a command: the text, the admissible commands, and True if the game is won."""

    feedback: str
    commands: Annotated[tuple[str, ...], Field(strict=False)]
    won: bool


ENGINE_REPLY = TypeAdapter(EngineReply)


class EngineHost(WorkerPool[Worker]):
    """A pool of `processes` workers. Each starts when it is first needed, and again after it has died.

    Games of the same name share a process, so that the problem is translated once. The processes end when the host is
    closed or garbage-collected.
    """

    def __init__(self, processes: int) -> None:
        env = {
            "PYTHONHASHSEED": "0",  # the order of sets shows in texts
            "ALFWORLD_DATA": str(packaged.folder()),  # otherwise importing alfworld creates a folder in the home
        }
        super().__init__(lambda: make_worker(WORKER, timeout=ANSWER_SECONDS, env=env, most_bytes=MOST_BYTES), processes)
        self._games = itertools.count()
        finalize(self, _close, self.workers)

    def play(self, game: str, problem: str, goal: str) -> HostedGame:
        """Return a client for a game at the worker that its name `game` determines."""
        return self.play_at(self.of(game), problem, goal)

    def play_at(self, worker: Worker, problem: str, goal: str) -> HostedGame:
        """Return a client for a game at a worker of this host."""
        return HostedGame(self, worker, next(self._games), problem, goal)


_SHARED: WeakValueDictionary[tuple[int, str], EngineHost] = WeakValueDictionary()
_SHARING = threading.Lock()


def shared_host(processes: int) -> EngineHost:
    """Return the host with `processes` workers on the current cluster or this machine; all callers share it."""
    key = processes, repr(current_cluster())
    with _SHARING:
        host = _SHARED.get(key)
        if host is None:
            host = _SHARED[key] = EngineHost(processes)
        return host


class HostedGame:
    """A client of one game in a worker process. Every call waits for that process.

    Raises:
        WorkerError: the process was lost, or the engine failed on the game or the command.
    """

    def __init__(self, host: EngineHost, worker: Worker, number: int, problem: str, goal: str) -> None:
        self._host, self._worker, self._number = host, worker, number
        self._problem, self._goal = problem, goal

    def reset(self) -> EngineReply:
        return self._call("reset", self._problem, self._goal)

    def step(self, command: str) -> EngineReply:
        return self._call("step", command)

    def close(self) -> None:
        if self._worker.alive:
            with suppress(WorkerError):  # the worker may have died meanwhile, with the game
                self._worker.call("end", self._number, reply=NOTHING)

    def _call(self, method: str, *arguments: str) -> EngineReply:
        return self._worker.call(method, self._number, *arguments, reply=ENGINE_REPLY)


def _close(workers: tuple[Worker, ...]) -> None:
    for worker in workers:
        worker.close()
