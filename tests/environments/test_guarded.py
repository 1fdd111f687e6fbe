"""Episodes that block hold up neither each other nor whoever plays them."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator

import pytest

from components.contracts.episodes import Observation, Outcome, Split, Task
from components.contracts.failures import RolloutFailed
from components.environments.guarded import GuardedEpisode
from components.environments.threads import LoopThread

TASK = Task("blocks", "train", {})


class Blocking:
    """Environment and episode in one. `step` blocks for as many seconds as the action says."""

    name, system_prompt, dialogue, max_turns = "blocking", None, True, 8

    def __init__(self) -> None:
        self.reward_weights = {"done": 1.0}
        self.threads: list[int] = []
        self.closed = 0

    def tasks(self, split: Split) -> Iterator[Task]:
        yield TASK

    def episode(self, task: Task) -> Blocking:
        self.threads.append(threading.get_ident())
        return self

    async def reset(self) -> Observation:
        self.threads.append(threading.get_ident())
        return Observation(("start",))

    async def step(self, action: str) -> Outcome:
        self.threads.append(threading.get_ident())
        time.sleep(float(action))
        return Outcome(Observation(("go on",)), {"done": 1.0})

    async def close(self) -> None:
        self.threads.append(threading.get_ident())
        self.closed += 1


def guarded(blocking: Blocking, timeout: float = 60.0) -> GuardedEpisode:
    return GuardedEpisode(blocking, TASK, timeout)


def test_an_episode_stays_in_one_thread_that_is_not_the_loops() -> None:
    async def play() -> None:
        blocking = Blocking()
        episode = guarded(blocking)
        assert (await episode.reset()).content == ("start",)
        with pytest.raises(RolloutFailed, match="could not convert"):
            await episode.step("raise")
        assert (await episode.step("0")).reward_parts == {"done": 1.0}
        await episode.close()
        assert blocking.closed == 1 and len(blocking.threads) == 5 and len(set(blocking.threads)) == 1
        assert blocking.threads[0] != threading.get_ident()

    asyncio.run(play())


def test_twenty_block_at_the_same_time_and_the_loop_goes_on() -> None:
    async def play() -> float:
        episodes = [guarded(Blocking()) for _ in range(20)]
        await asyncio.gather(*(episode.reset() for episode in episodes))
        started = time.monotonic()
        steps = asyncio.gather(*(episode.step("0.5") for episode in episodes))
        await asyncio.sleep(0.1)
        assert time.monotonic() - started < 0.4 and not steps.done()
        await steps
        await asyncio.gather(*(episode.close() for episode in episodes))
        return time.monotonic() - started

    assert asyncio.run(play()) < 5


def test_a_step_given_up_is_closed_when_it_returns() -> None:
    blocking = Blocking()

    async def play() -> float:
        episode = guarded(blocking, timeout=0.1)
        await episode.reset()
        started = time.monotonic()
        with pytest.raises(RolloutFailed, match=r"step took more than 0\.1 s"):
            await episode.step("3")
        await episode.close()  # nobody waits for it
        return time.monotonic() - started

    assert asyncio.run(play()) < 2.5 and not blocking.closed
    until = time.monotonic() + 10
    while not blocking.closed and time.monotonic() < until:
        time.sleep(0.01)
    assert blocking.closed == 1 and len(set(blocking.threads)) == 1


def test_a_cancelled_step_ends_the_waiting_and_not_the_episode() -> None:
    blocking = Blocking()

    async def play() -> None:
        episode = guarded(blocking)
        await episode.reset()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(episode.step("1.5"), 0.1)
        await episode.close()

    asyncio.run(play())
    until = time.monotonic() + 10
    while not blocking.closed and time.monotonic() < until:
        time.sleep(0.01)
    assert blocking.closed == 1


def test_a_call_that_is_cancelled_before_it_began_is_not_stuck() -> None:
    async def play() -> None:
        thread, began = LoopThread("busy"), asyncio.Event()
        here, ran = asyncio.get_running_loop(), []

        async def block() -> None:
            here.call_soon_threadsafe(began.set)
            time.sleep(0.3)

        async def late() -> None:
            ran.append("late")

        blocking = asyncio.create_task(thread.call(block))
        await began.wait()
        waiting = asyncio.create_task(thread.call(late))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert not thread.stuck and not ran
        await blocking
        thread.end()

    asyncio.run(play())


def test_a_cancelled_close_closes() -> None:
    async def play() -> None:
        blocking = Blocking()
        episode = guarded(blocking)
        await episode.reset()
        closing = asyncio.create_task(episode.close())
        await asyncio.sleep(0)
        closing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await closing
        assert blocking.closed == 1

    asyncio.run(play())
