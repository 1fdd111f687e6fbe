"""Few processes that play many games."""

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
"""A process that is silent for longer hangs; its games are lost."""

MOST_BYTES = 2**24
"""Of the answer to one command."""

WORKER = "armature.components.environments.alfworld.text.worker"


class EngineReply(ReplyForm):
    """What the engine says after a command."""

    feedback: str
    commands: Annotated[tuple[str, ...], Field(strict=False)]
    won: bool


ENGINE_REPLY = TypeAdapter(EngineReply)


class EngineHost(WorkerPool[Worker]):
    """`processes` workers, each started when it is first needed and again after it has died.

    Games of the same name share a process, which then translates the problem once. The processes end with the host,
    be it that it is closed or that it is forgotten.
    """

    def __init__(self, processes: int) -> None:
        env = {
            "PYTHONHASHSEED": "0",  # texts list what sets of facts hold
            "ALFWORLD_DATA": str(packaged.folder()),  # else importing alfworld makes a folder in the home
        }
        super().__init__(lambda: make_worker(WORKER, timeout=ANSWER_SECONDS, env=env, most_bytes=MOST_BYTES), processes)
        self._games = itertools.count()
        finalize(self, _close, self.workers)

    def play(self, game: str, problem: str, goal: str) -> HostedGame:
        """A game to reset and step; `game` names it."""
        return self.play_at(self.of(game), problem, goal)

    def play_at(self, worker: Worker, problem: str, goal: str) -> HostedGame:
        """A game at one of the workers."""
        return HostedGame(self, worker, next(self._games), problem, goal)


_SHARED: WeakValueDictionary[tuple[int, str], EngineHost] = WeakValueDictionary()
_SHARING = threading.Lock()


def shared_host(processes: int) -> EngineHost:
    """The host of all that ask for `processes` at the same time, on the same cluster or on this machine."""
    key = processes, repr(current_cluster())
    with _SHARING:
        host = _SHARED.get(key)
        if host is None:
            host = _SHARED[key] = EngineHost(processes)
        return host


class HostedGame:
    """One episode's game. Every call waits for the process that plays it.

    Raises:
        WorkerError: the process was lost, or the engine refuses the game or the command.
    """

    def __init__(self, host: EngineHost, worker: Worker, number: int, problem: str, goal: str) -> None:
        self._host, self._worker, self._number = host, worker, number
        self._problem, self._goal = problem, goal

    def reset(self) -> EngineReply:
        return self._shown("reset", self._problem, self._goal)

    def step(self, command: str) -> EngineReply:
        return self._shown("step", command)

    def close(self) -> None:
        if self._worker.alive:
            with suppress(WorkerError):  # it died meanwhile, and the game with it
                self._worker.call("end", self._number, reply=NOTHING)

    def _shown(self, method: str, *arguments: str) -> EngineReply:
        return self._worker.call(method, self._number, *arguments, reply=ENGINE_REPLY)


def _close(workers: tuple[Worker, ...]) -> None:
    for worker in workers:
        worker.close()
