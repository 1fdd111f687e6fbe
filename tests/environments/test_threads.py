"""Episodes that block do not hold up the others."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from components.contracts.episodes import Observation, Outcome
from components.environments.threads import ThreadedEpisode


class Blocking:
    def __init__(self, seconds: float = 0.0) -> None:
        self.seconds = seconds
        self.threads: list[int] = []
        self.closed = 0

    def reset(self) -> Observation:
        self.threads.append(threading.get_ident())
        return Observation(("start",))

    def step(self, action: str) -> Outcome:
        self.threads.append(threading.get_ident())
        if action == "raise":
            raise RuntimeError("lost")
        time.sleep(self.seconds)
        return Outcome(None, {"done": 1.0})

    def close(self) -> None:
        self.threads.append(threading.get_ident())
        self.closed += 1


def test_an_episode_stays_in_one_thread_that_is_not_the_loops() -> None:
    async def play() -> None:
        blocking = Blocking()
        episode = ThreadedEpisode(blocking)
        assert (await episode.reset()).content == ("start",)
        with pytest.raises(RuntimeError, match="lost"):
            await episode.step("raise")
        assert (await episode.step("go")).reward_parts == {"done": 1.0}
        await episode.close()
        await episode.close()
        assert blocking.closed == 1 and len(set(blocking.threads)) == 1
        assert blocking.threads[0] != threading.get_ident()

    asyncio.run(play())


def test_twenty_block_at_the_same_time() -> None:
    async def play() -> float:
        episodes = [ThreadedEpisode(Blocking(0.2)) for _ in range(20)]
        await asyncio.gather(*(episode.reset() for episode in episodes))
        started = time.monotonic()
        await asyncio.gather(*(episode.step("go") for episode in episodes))
        await asyncio.gather(*(episode.close() for episode in episodes))
        return time.monotonic() - started

    assert asyncio.run(play()) < 2


def test_a_step_given_up_is_closed_when_it_returns() -> None:
    blocking = Blocking(0.3)

    async def play() -> None:
        episode = ThreadedEpisode(blocking)
        await episode.reset()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(episode.step("go"), 0.05)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(episode.close(), 0.05)

    asyncio.run(play())
    until = time.monotonic() + 5
    while not blocking.closed and time.monotonic() < until:
        time.sleep(0.01)
    assert blocking.closed == 1
