"""An episode that costs no more than itself: whatever it does ends as an answer or a `RolloutFailed`, in time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import TypeVar

from armature.components.contracts.checks import checked_numbers, checked_observation, checked_outcome
from armature.components.contracts.episodes import Environment, Episode, Observation, Outcome, Task
from armature.components.contracts.failures import RolloutFailed
from armature.components.environments.threads import PATIENCE, LoopThread

ResultT = TypeVar("ResultT")


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
