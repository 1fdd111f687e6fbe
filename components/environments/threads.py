"""Threads beside the event loop, for code that may block it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from contextvars import copy_context
from selectors import PollSelector
from threading import Thread
from typing import Any, TypeVar

from armature.components.contracts.episodes import Episode, Observation, Outcome
from armature.components.contracts.failures import RolloutFailed, said
from armature.components.process import ForkGuard

ResultT = TypeVar("ResultT")

PATIENCE = 1.0
"""Seconds that a call which was given up has to end; one that has not is stuck."""

HANDLES = 2
"""File handles of a `LoopThread`."""


class LoopThread:
    """A daemon thread with an event loop of its own, for coroutines that were not written by us.

    Whatever they do stays there: they may block, raise what would end a loop, and ignore that they are cancelled.
    `stuck`: a call was given up and is still running.
    """

    def __init__(self, name: str) -> None:
        self.stuck = False
        self._guard = ForkGuard()
        self._loop = asyncio.SelectorEventLoop(PollSelector())  # it takes two file handles, epoll's three
        self._ending = False
        self._tasks: set[asyncio.Task[None]] = set()
        Thread(target=copy_context().run, args=(self._work,), name=name, daemon=True).start()

    async def call(self, function: Callable[[], Awaitable[ResultT]], timeout: float | None = None) -> ResultT:
        """What `function` gives; it is called in the thread, beside the calls that are still going on there.

        Raises:
            TimeoutError: it took longer than `timeout` seconds, and was cancelled.
            RolloutFailed: what it raised itself, or `environment_error` for whatever else it raised.
        """
        here = asyncio.get_running_loop()
        answer: asyncio.Future[ResultT] = here.create_future()
        answer.add_done_callback(asyncio.Future.exception)  # or asyncio says that nobody read it, after a cancellation
        tasks: list[asyncio.Task[None]] = []

        async def work() -> None:
            result: Any = None
            failure = None
            try:
                with self._guard:  # A child that was forked there would go on with a copy of this run.
                    result = await function()
            except RolloutFailed as failed:
                failure = failed
            except BaseException as error:
                failure = RolloutFailed("environment_error", said(error))
            with suppress(RuntimeError):  # the loop is closed: nobody waits any more
                here.call_soon_threadsafe(_settle, answer, result, failure)

        def never_began(task: asyncio.Task[None]) -> None:
            if task.cancelled():  # before its first line, which would have seen to the answer
                with suppress(RuntimeError):
                    here.call_soon_threadsafe(_settle, answer, None, None)

        def start() -> None:
            tasks.append(self._start(work()))
            tasks[0].add_done_callback(never_began)

        def cancel() -> None:
            for task in tasks:
                task.cancel()

        self._loop.call_soon_threadsafe(start)
        try:
            done, _ = await asyncio.wait([answer], timeout=timeout)
            if done:
                return answer.result()
            raise TimeoutError
        except (TimeoutError, asyncio.CancelledError):
            self._loop.call_soon_threadsafe(cancel)
            done, _ = await asyncio.wait([answer], timeout=PATIENCE)
            self.stuck = self.stuck or not done
            raise

    def end(self, last: Callable[[], Awaitable[object]] | None = None) -> None:
        """End the thread, after `last` if given; nobody waits for either."""

        async def leave() -> None:
            with suppress(BaseException):  # nobody is left to be told
                if last is not None:
                    await last()
            self._ending = True
            self._loop.stop()

        self._loop.call_soon_threadsafe(lambda: self._start(leave()))

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _work(self) -> None:
        asyncio.set_event_loop(self._loop)
        while not self._ending:
            with suppress(BaseException):  # SystemExit of a task that nobody waits for ends a loop
                self._loop.run_forever()
        left = asyncio.all_tasks(self._loop)
        for task in left:
            task.cancel()
        if left:
            self._loop.run_until_complete(asyncio.wait(left, timeout=PATIENCE))
        self._loop.close()


class SharedThreadEpisode:
    """An episode in a thread that it shares, for episodes whose clients, locks or sessions belong to one event loop.

    One that blocks holds up the others of its thread.
    """

    def __init__(self, episode: Episode, thread: LoopThread) -> None:
        self._episode, self._thread = episode, thread

    async def reset(self) -> Observation:
        return await self._thread.call(self._episode.reset)

    async def step(self, action: str) -> Outcome:
        return await self._thread.call(lambda: self._episode.step(action))

    async def close(self) -> None:
        await self._thread.call(self._episode.close)


def _settle(answer: asyncio.Future[Any], result: Any, failure: Exception | None) -> None:
    if answer.done():
        return
    if failure is not None:
        answer.set_exception(failure)
    else:
        answer.set_result(result)
