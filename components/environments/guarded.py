"""An episode that costs no more than itself: whatever it does ends as an answer or a `RolloutFailed`, in time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from contextvars import copy_context
from selectors import PollSelector
from threading import Thread
from typing import Any, TypeVar

from armature.components.contracts.checks import checked_numbers, checked_observation, checked_outcome
from armature.components.contracts.episodes import Environment, Episode, Observation, Outcome, Task
from armature.components.contracts.errors import RolloutFailed, said
from armature.components.machine.process import ForkGuard

# Threads beside the event loop, for code that may block it.

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


class GuardedEpisode:
    """An episode of `task`, played in a thread and an event loop of its own.

    It may block, never return, raise anything, ignore that it is cancelled: other episodes, the requests of the policy
    and the end of the run do not wait for it. What it gives is checked and copied. A call has `timeout` seconds.

    `reward_weights`: those of the environment at the last step.
    """

    def __init__(self, environment: Environment, task: Task, timeout: float) -> None:
        self._environment, self._task, self._timeout = environment, task, timeout
        self._thread = LoopThread(f"episode of {task.task_id}")
        self._episode: Episode | None = None
        self.reward_weights: dict[str, float] = {}

    async def reset(self) -> Observation:
        """Makes the episode and begins it.

        Raises:
            RolloutFailed: see `checked_observation`, or `environment_timeout`.
        """

        async def make() -> None:
            self._episode = self._environment.episode(self._task)

        async def reset() -> Observation:
            assert self._episode is not None
            return checked_observation(await self._episode.reset())

        await self._ask("episode", make)
        return await self._ask("reset", reset)

    async def step(self, action: str) -> Outcome:
        """
        Raises:
            RolloutFailed: see `checked_outcome`, or `environment_timeout`.
        """

        async def step() -> Outcome:
            assert self._episode is not None
            outcome = checked_outcome(await self._episode.step(action))
            self.reward_weights = checked_numbers("reward_weights", self._environment.reward_weights)
            return outcome

        return await self._ask("step", step)

    async def close(self) -> None:
        """Whoever is cancelled here does not cancel the closing, which has `PATIENCE` seconds then.

        Raises:
            RolloutFailed: it raised, or took too long. What is stuck is closed when it returns.
        """

        async def close() -> None:
            if self._episode is not None:
                await self._episode.close()

        if self._thread.stuck:
            self._thread.end(close)
            return
        closing = asyncio.ensure_future(self._ask("close", close))
        try:
            await asyncio.shield(closing)
        except asyncio.CancelledError:
            with suppress(TimeoutError):
                async with asyncio.timeout(PATIENCE):
                    await asyncio.gather(closing, return_exceptions=True)
            raise
        finally:
            self._thread.end()

    async def _ask(self, name: str, function: Callable[[], Awaitable[ResultT]]) -> ResultT:
        try:
            return await self._thread.call(function, self._timeout)
        except TimeoutError:
            raise RolloutFailed("environment_timeout", f"{name} took more than {self._timeout:g} s") from None
        except RolloutFailed as failed:
            raise RolloutFailed(failed.reason, f"{name}: {failed.detail}") from failed
