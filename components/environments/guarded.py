"""Run episodes in threads of their own, so that a faulty episode fails alone and within its time limit."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from contextvars import copy_context
from selectors import PollSelector
from threading import Thread
from typing import Any, TypeVar

from armature.components.contracts.checks import checked_numbers, checked_observation, checked_outcome
from armature.components.contracts.episodes import (
    ChatAnswer,
    ChatEpisode,
    Environment,
    Episode,
    Observation,
    Outcome,
    Task,
)
from armature.components.contracts.errors import RolloutFailed, said
from armature.components.machine.process import ForkGuard

# --- An event loop in a thread, for code that may block it ---

ResultT = TypeVar("ResultT")

PATIENCE = 1.0
"""Seconds that a cancelled call has to end. A call that is still running after them counts as stuck."""

HANDLES = 2
"""Number of file handles that a `LoopThread` holds."""


class LoopThread:
    """A daemon thread with its own event loop, for coroutines that we did not write.

    Such a coroutine may block, raise an exception that would end an event loop, or ignore its cancellation, without
    any effect on the caller's event loop. `stuck` is True if a call was cancelled and is still running.
    """

    def __init__(self, name: str) -> None:
        self.stuck = False
        self._guard = ForkGuard()
        self._loop = asyncio.SelectorEventLoop(PollSelector())  # it takes two file handles, epoll's three
        self._ending = False
        self._tasks: set[asyncio.Task[None]] = set()
        Thread(target=copy_context().run, args=(self._work,), name=name, daemon=True).start()

    async def call(self, function: Callable[[], Awaitable[ResultT]], timeout: float | None = None) -> ResultT:
        """Call `function` in the thread and return its result. Several calls may be running there at the same time.

        Raises:
            TimeoutError: the call took longer than `timeout` seconds and was cancelled.
            RolloutFailed: the function raised it, or the function raised anything else (`environment_error`).
        """
        here = asyncio.get_running_loop()
        answer: asyncio.Future[ResultT] = here.create_future()
        # Read the exception, or asyncio logs after a cancellation that it was never retrieved.
        answer.add_done_callback(asyncio.Future.exception)
        tasks: list[asyncio.Task[None]] = []

        async def work() -> None:
            result: Any = None
            failure = None
            try:
                with self._guard:  # a child process forked in the function would continue a copy of this run
                    result = await function()
            except RolloutFailed as failed:
                failure = failed
            except BaseException as error:
                failure = RolloutFailed("environment_error", said(error))
            with suppress(RuntimeError):  # the caller's loop is closed: nobody waits any more
                here.call_soon_threadsafe(_settle, answer, result, failure)

        def never_began(task: asyncio.Task[None]) -> None:
            if task.cancelled():  # cancelled before `work` began, so `work` cannot settle the answer
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
        """End the thread, after calling `last` in it if there is one. Return at once, without waiting for either."""

        async def leave() -> None:
            with suppress(BaseException):  # nobody waits for the result
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
            with suppress(BaseException):  # a SystemExit in any task ends `run_forever`, so start it again
                self._loop.run_forever()
        left = asyncio.all_tasks(self._loop)
        for task in left:
            task.cancel()
        if left:
            self._loop.run_until_complete(asyncio.wait(left, timeout=PATIENCE))
        self._loop.close()


class SharedThreadEpisode:
    """An episode that runs in a thread shared with other episodes, whose clients, locks or sessions need one event
    loop.

    An episode that blocks delays the others of its thread.
    """

    def __init__(self, episode: ChatEpisode, thread: LoopThread) -> None:
        self._episode, self._thread = episode, thread

    async def reset(self) -> Observation:
        return await self._thread.call(self._episode.reset)

    async def step(self, action: str) -> Outcome:
        return await self._thread.call(lambda: self._episode.step(action))

    async def answer(self, answer: ChatAnswer) -> Outcome:
        return await self._thread.call(lambda: self._episode.answer(answer))

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
    """An episode of `task` that is played in its own thread and event loop, with `timeout` seconds for each call.

    The episode may block, never return, raise anything or ignore its cancellation: other episodes, the requests to the
    policy and the end of the run do not wait for it. Its observations and outcomes are checked and copied.

    `reward_weights` holds the environment's weights as of the last step. With `preview`, the episode only shows the
    first observation: an environment may have a method `preview(task)` for that.

    Example:
        >>> import asyncio
        >>> from armature.components.environments.make import make_environment
        >>> from armature.components.environments.settings import EnvironmentSettings
        >>> environment = make_environment(EnvironmentSettings(name="colors", train_tasks=1, heldout_tasks=1))
        >>> async def play():
        ...     episode = GuardedEpisode(environment, next(environment.tasks("train")), timeout=60.0)
        ...     await episode.reset()
        ...     outcome = await episode.step("red")
        ...     await episode.close()
        ...     return outcome.reward_parts
        >>> asyncio.run(play())
        {'correct': 1.0, 'format': 1.0}
    """

    def __init__(self, environment: Environment, task: Task, timeout: float, *, preview: bool = False) -> None:
        self._environment, self._task, self._timeout = environment, task, timeout
        self._make = getattr(environment, "preview", environment.episode) if preview else environment.episode
        self._thread = LoopThread(f"episode of {task.task_id}")
        self._episode: Episode | None = None
        self.reward_weights: dict[str, float] = {}

    async def reset(self) -> Observation:
        """Create the episode, reset it and return its first observation.

        Raises:
            RolloutFailed: a call failed or took too long (`environment_timeout`), or the observation is not valid, see
                `checked_observation`.
        """

        async def make() -> None:
            self._episode = self._make(self._task)

        async def reset() -> Observation:
            assert self._episode is not None
            return checked_observation(await self._episode.reset())

        await self._ask("episode", make)
        return await self._ask("reset", reset)

    async def step(self, action: str) -> Outcome:
        """Apply an action and return its outcome.

        Raises:
            RolloutFailed: the call failed or took too long (`environment_timeout`), or the outcome is not valid, see
                `checked_outcome`.
        """

        return await self._outcome("step", action)

    async def answer(self, answer: ChatAnswer) -> Outcome:
        """Answer the request of a `ChatEpisode` and return the outcome.

        Raises:
            RolloutFailed: as in `step`.
        """
        return await self._outcome("answer", answer)

    async def _outcome(self, name: str, argument: str | ChatAnswer) -> Outcome:
        async def call() -> Outcome:
            outcome = checked_outcome(await getattr(self._episode, name)(argument))
            self.reward_weights = checked_numbers("reward_weights", self._environment.reward_weights)
            return outcome

        return await self._ask(name, call)

    async def close(self) -> None:
        """Close the episode and end its thread.

        If the caller is cancelled here, closing continues for up to `PATIENCE` seconds. An episode that is stuck in an
        earlier call is closed when that call returns, and nobody waits for it.

        Raises:
            RolloutFailed: closing raised an exception or took too long.
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
