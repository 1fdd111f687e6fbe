"""For environments that block: their episodes run in threads of their own, beside the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from threading import Thread
from typing import Protocol, TypeVar

from components.contracts.episodes import Observation, Outcome

ResultT = TypeVar("ResultT")


class BlockingEpisode(Protocol):
    """An `Episode` without async."""

    def reset(self) -> Observation: ...

    def step(self, action: str) -> Outcome: ...

    def close(self) -> None: ...


class ThreadedEpisode:
    """An `Episode` whose calls run one after the other in one thread.

    A call that is given up after a timeout keeps its thread until it returns, and the close that follows waits
    for it there; the thread is a daemon, so that not even a call that never returns holds up the program's end.
    """

    def __init__(self, episode: BlockingEpisode) -> None:
        self._episode = episode
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread: Thread | None = None
        self._closed = False

    async def reset(self) -> Observation:
        return await self._run(self._episode.reset)

    async def step(self, action: str) -> Outcome:
        return await self._run(self._episode.step, action)

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        try:
            await self._run(self._episode.close)
        finally:
            self._calls.put(None)

    async def _run(self, function: Callable[..., ResultT], *arguments: str) -> ResultT:
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[ResultT] = loop.create_future()

        def settle(result: ResultT | None, error: BaseException | None) -> None:
            if answer.cancelled():
                return
            if error is not None:
                answer.set_exception(error)
            else:
                answer.set_result(result)  # type: ignore[arg-type]

        def call() -> None:
            result, error = None, None
            try:
                result = function(*arguments)
            except Exception as raised:
                error = raised
            with suppress(RuntimeError):  # the loop is closed: nobody waits any more
                loop.call_soon_threadsafe(settle, result, error)

        self._calls.put(call)
        if self._thread is None:
            self._thread = Thread(target=self._work, name="episode", daemon=True)
            self._thread.start()
        return await answer

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            call()
