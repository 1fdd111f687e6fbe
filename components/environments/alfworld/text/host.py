"""Few processes that play many games, and coroutines that ask them from any event loop."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any
from weakref import finalize

from components.contracts.errors import ArmatureError
from components.environments.alfworld import packaged

Answer = dict[str, Any]


class EngineError(ArmatureError):
    """A process that plays games ended, or refused a game."""


@dataclass(frozen=True, slots=True)
class EngineReply:
    """What the engine says after a command."""

    feedback: str
    commands: tuple[str, ...]
    won: bool


class EngineProcess:
    """One worker process. Two threads carry lines to and from it, so that no event loop waits for a pipe."""

    def __init__(self) -> None:
        root = Path(__file__).parents[4]
        paths = [str(root), *filter(None, [os.environ.get("PYTHONPATH")])]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "components.environments.alfworld.text.worker", str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join(paths),
                "PYTHONHASHSEED": "0",  # texts list what sets of facts hold
                "ALFWORLD_DATA": str(packaged.folder()),  # else importing alfworld makes a folder in the home
                "OMP_NUM_THREADS": "1",
            },
        )
        self._numbers = itertools.count()
        self._outgoing: SimpleQueue[bytes | None] = SimpleQueue()
        self._waiting: dict[int, Callable[[Answer], None]] = {}
        self._lock = threading.Lock()
        self._ended = False
        for work in (self._write, self._read):
            threading.Thread(target=work, name=f"alfworld-{work.__name__}", daemon=True).start()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return not self._ended

    async def ask(self, do: str, **details: Any) -> Answer:
        """
        Raises:
            EngineError: the process has ended, or the request failed there.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Answer] = loop.create_future()

        def settle(answer: Answer) -> None:
            if not future.done():
                future.set_result(answer)

        def deliver(answer: Answer) -> None:
            with suppress(RuntimeError):  # the loop is closed: nobody waits any more
                loop.call_soon_threadsafe(settle, answer)

        number = next(self._numbers)
        with self._lock:
            if self._ended:
                deliver(self._death())
            else:
                self._waiting[number] = deliver
                self._outgoing.put(json.dumps({"id": number, "do": do, **details}).encode() + b"\n")
        answer = await future
        if error := answer.get("error"):
            raise EngineError(f"the text engine failed: {error}", where=f"process {self.pid}, request {do!r}")
        return answer

    def stop(self) -> None:
        """End the process, whatever it is doing; it keeps nothing that is needed again."""
        self._process.kill()
        self._outgoing.put(None)
        self._process.wait()

    def _write(self) -> None:
        assert self._process.stdin is not None
        with suppress(OSError), self._process.stdin as pipe:
            while (line := self._outgoing.get()) is not None:
                pipe.write(line)
                pipe.flush()

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as pipe:
            for line in pipe:
                if not line.endswith(b"\n"):  # it died within an answer
                    break
                answer = json.loads(line)
                with self._lock:
                    deliver = self._waiting.pop(answer["id"])
                deliver(answer)
        self._process.wait()
        with self._lock:
            self._ended = True
            waiting, self._waiting = self._waiting, {}
        self._outgoing.put(None)
        for deliver in waiting.values():
            deliver(self._death())

    def _death(self) -> Answer:
        return {"error": f"its process ended with code {self._process.returncode}; the next game starts another"}


class EngineHost:
    """`processes` workers, each started when it is first needed and again after it has died.

    Episodes of the same game share a process, which then translates the game once. So do environments that are
    open at the same time: see `shared_host`.
    """

    def __init__(self, processes: int) -> None:
        self._users = 0
        self._workers: list[EngineProcess | None] = [None] * processes
        self._homes: dict[str, int] = {}
        self._games = itertools.count()
        self._lock = threading.RLock()  # the thread that holds it may collect garbage, and with it the last user
        finalize(self, _stop_all, self._workers)

    def play(self, game: str, problem: str, goal: str) -> HostedGame:
        """A game to reset and step; `game` names it."""
        with self._lock:
            home = self._homes.setdefault(game, len(self._homes) % len(self._workers))
            return HostedGame(self, home, next(self._games), problem, goal)

    def worker(self, index: int) -> EngineProcess:
        with self._lock:
            current = self._workers[index]
            if current is None or not current.alive:
                current = self._workers[index] = EngineProcess()
            return current

    def join(self) -> None:
        """Count one more user."""
        with self._lock:
            self._users += 1

    def leave(self) -> None:
        """Count one user less; the last one ends all processes."""
        with self._lock:
            self._users -= 1
            if not self._users:
                self.close()

    def running(self) -> list[EngineProcess]:
        return [worker for worker in self._workers if worker is not None and worker.alive]

    def close(self) -> None:
        """End all processes. A game that is asked for afterwards starts one again."""
        with self._lock:
            _stop_all(self._workers)


_SHARED: dict[int, EngineHost] = {}


def shared_host(processes: int, user: object) -> tuple[EngineHost, Callable[[], object]]:
    """The host of all environments that ask for `processes`, and what `user` calls when it needs it no more.

    Its processes end with the last user, be it that it said so or that it was forgotten.
    """
    host = _SHARED.setdefault(processes, EngineHost(processes))
    host.join()
    return host, finalize(user, host.leave)


class HostedGame:
    """One episode's game. Commands after a reset go to the process that was asked for it, or fail with it."""

    def __init__(self, host: EngineHost, home: int, number: int, problem: str, goal: str) -> None:
        self._host, self._home, self._number = host, home, number
        self._problem, self._goal = problem, goal
        self._worker: EngineProcess | None = None

    async def reset(self) -> EngineReply:
        self._worker = self._host.worker(self._home)
        return _shown(await self._worker.ask("reset", game=self._number, problem=self._problem, goal=self._goal))

    async def step(self, command: str) -> EngineReply:
        assert self._worker is not None, "reset comes before step"
        return _shown(await self._worker.ask("step", game=self._number, command=command))

    async def close(self) -> None:
        worker, self._worker = self._worker, None
        if worker is not None and worker.alive:
            with suppress(EngineError):  # it died meanwhile, and the game with it
                await worker.ask("close", game=self._number)


def _shown(answer: Answer) -> EngineReply:
    return EngineReply(answer["feedback"], tuple(answer["commands"]), answer["won"])


def _stop_all(workers: list[EngineProcess | None]) -> None:
    for index, worker in enumerate(workers):
        if worker is not None:
            workers[index] = None
            worker.stop()
