"""Guarded episodes: one that blocks, raises or forks affects neither other episodes nor the event loop."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import threading
import time
from collections.abc import Iterator

import pytest

from armature.components.contracts.episodes import Observation, Outcome, Split, Task
from armature.components.environments.guarded import GuardedEpisode, LoopThread
from tests.refusals import refused

TASK = Task("blocks", "train", {})


class Blocking:
    """An environment that is its own episode. `step("wait")` blocks until `release` is set."""

    name, system_prompt, dialogue, max_turns = "blocking", None, True, 8

    def __init__(self) -> None:
        self.reward_weights = {"done": 1.0}
        self.threads: list[int] = []
        self.inside, self.release, self.closed = threading.Event(), threading.Event(), threading.Event()

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
        if action == "wait":
            self.inside.set()
            assert self.release.wait(60)
        else:
            int(action)
        return Outcome(Observation(("go on",)), {"done": 1.0})

    async def close(self) -> None:
        self.threads.append(threading.get_ident())
        assert not self.closed.is_set()
        self.closed.set()


def guarded(blocking: Blocking, timeout: float = 60.0) -> GuardedEpisode:
    return GuardedEpisode(blocking, TASK, timeout)


def test_episode_runs_in_one_thread_of_its_own() -> None:
    async def play() -> None:
        blocking = Blocking()
        episode = guarded(blocking)
        assert (await episode.reset()).content == ("start",)
        with refused("environment_error", "ValueError"):
            await episode.step("raise")
        assert (await episode.step("0")).reward_parts == {"done": 1.0}
        await episode.close()
        assert blocking.closed.is_set() and len(blocking.threads) == 5 and len(set(blocking.threads)) == 1
        assert blocking.threads[0] != threading.get_ident()

    asyncio.run(play())


def test_blocking_episodes_do_not_block_the_event_loop() -> None:
    async def play() -> None:
        blocking = [Blocking() for _ in range(20)]
        episodes = [guarded(each) for each in blocking]
        await asyncio.gather(*(episode.reset() for episode in episodes))
        steps = asyncio.gather(*(episode.step("wait") for episode in episodes))
        while not all(each.inside.is_set() for each in blocking):
            assert not steps.done()
            await asyncio.sleep(0.01)
        for each in blocking:
            each.release.set()
        await steps
        await asyncio.gather(*(episode.close() for episode in episodes))

    asyncio.run(play())


class Forking(Blocking):
    """An environment whose `step` forks; in the child process it returns too, or raises for the action "raise"."""

    def __init__(self) -> None:
        super().__init__()
        self.children: list[int] = []

    async def step(self, action: str) -> Outcome:
        if pid := os.fork():
            self.children.append(pid)
        elif action == "raise":
            raise LookupError("in the child")
        return Outcome(Observation(("parent" if pid else "child",)), {"done": 1.0})


def test_forked_child_process_ends() -> None:
    forking = Forking()

    async def play() -> None:
        episode = guarded(forking)
        await episode.reset()
        for action in ("0", "raise", "0"):
            observation = (await episode.step(action)).observation
            assert observation is not None and observation.content == ("parent",)
        await episode.close()

    asyncio.run(play())
    left, end = set(forking.children), time.monotonic() + 10
    while left and time.monotonic() < end:
        left -= {pid for pid in left if os.waitpid(pid, os.WNOHANG)[0]}
        time.sleep(0.01)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    assert not left


def test_timed_out_step_is_closed_after_it_returns() -> None:
    blocking = Blocking()

    async def play() -> None:
        episode = guarded(blocking, timeout=1.0)
        await episode.reset()
        with refused("environment_timeout", "step", "1 s"):
            await episode.step("wait")
        await episode.close()  # nobody waits for it

    asyncio.run(play())
    assert not blocking.closed.is_set()
    blocking.release.set()
    assert blocking.closed.wait(30) and len(set(blocking.threads)) == 1


def test_cancelled_step_is_closed_after_it_returns() -> None:
    blocking = Blocking()

    async def play() -> None:
        episode = guarded(blocking)
        await episode.reset()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(episode.step("wait"), 0.1)
        await episode.close()

    asyncio.run(play())
    assert not blocking.closed.is_set()
    blocking.release.set()
    assert blocking.closed.wait(30)


def test_call_cancelled_before_start_is_not_stuck() -> None:
    async def play() -> None:
        thread, began = LoopThread("busy"), asyncio.Event()
        here, release, ran = asyncio.get_running_loop(), threading.Event(), []

        async def block() -> None:
            here.call_soon_threadsafe(began.set)
            assert release.wait(60)

        async def late() -> None:
            ran.append("late")

        blocking = asyncio.create_task(thread.call(block))
        await began.wait()
        waiting = asyncio.create_task(thread.call(late))
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.sleep(0)
        release.set()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert not thread.stuck and not ran
        await blocking
        thread.end()

    asyncio.run(play())


def test_cancelled_close_still_closes_the_episode() -> None:
    async def play() -> None:
        blocking = Blocking()
        episode = guarded(blocking)
        await episode.reset()
        closing = asyncio.create_task(episode.close())
        await asyncio.sleep(0)
        closing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await closing
        assert blocking.closed.is_set()

    asyncio.run(play())


def test_cancelled_call_reports_no_unretrieved_exception() -> None:
    """asyncio reports an exception that nobody retrieved when it collects the future."""
    reported: list[dict[str, object]] = []

    async def play() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context))
        thread, began = LoopThread("waits"), asyncio.Event()
        loop = asyncio.get_running_loop()

        async def waits() -> None:
            loop.call_soon_threadsafe(began.set)
            await asyncio.sleep(60)

        call = asyncio.ensure_future(thread.call(waits))
        await began.wait()
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        thread.end()
        del call
        gc.collect()

    asyncio.run(play())
    assert not reported
