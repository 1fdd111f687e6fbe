"""Servers of a run's own that are started as requests wait and stopped when idle; stand-in programs in vLLM's place."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from armature.components.contracts.autoscaling import ServerAutoscaling
from armature.components.contracts.machine import Machine
from armature.components.inference import members
from armature.components.inference.autoscaling import Autoscaler
from armature.components.inference.pool import ServerPool
from armature.components.inference.settings import SamplingSettings
from tests.refusals import refused

from .test_endpoints_file import MESSAGES, until
from .test_pool_restarts import kill, local_pool

__all__ = ["local_pool"]
PLAN = ServerAutoscaling(max_servers=2, target_ongoing_requests=4, upscale_delay=0.2, downscale_delay=0.6)
LocalPool = Callable[..., ServerPool]
Checkpoint = Callable[..., Path]


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(members, "READ_EVERY", 0.05)


def changes(autoscaler: Autoscaler, servers: int, loads: list[int]) -> list[int]:
    """How many servers there are after each second with so many requests in flight."""
    counts = []
    for second, load in enumerate(loads):
        servers += autoscaler.change(float(second), load, servers)
        counts.append(servers)
    return counts


def test_one_is_started_after_the_delay_and_one_stopped_after_its_own() -> None:
    plan = ServerAutoscaling(max_servers=3, target_ongoing_requests=10, upscale_delay=2, downscale_delay=4)
    assert changes(Autoscaler(plan, 1), 1, [0, 10, 11, 11, 11, 11, 11]) == [1, 1, 1, 1, 2, 2, 2]
    assert changes(Autoscaler(plan, 1), 1, [99] * 8) == [1, 1, 2, 2, 3, 3, 3, 3]
    assert changes(Autoscaler(plan, 1), 3, [20] * 6) == [3, 3, 3, 3, 2, 2]
    assert changes(Autoscaler(plan, 2), 3, [0] * 12) == [3] * 4 + [2] * 8


def test_what_does_not_last_changes_nothing() -> None:
    plan = ServerAutoscaling(max_servers=3, target_ongoing_requests=10, upscale_delay=2, downscale_delay=2)
    assert changes(Autoscaler(plan, 1), 2, [99, 99, 15, 99, 0, 0, 15, 0, 99]) == [2] * 9


class Load:
    """So many requests at once, one after another, until the block ends."""

    def __init__(self, pool: ServerPool, sampling: SamplingSettings, at_once: int) -> None:
        self._pool, self._sampling, self._at_once = pool, sampling, at_once
        self.results, self._asked, self._ends = list[Any](), 0, False

    async def __aenter__(self) -> Load:
        self._tasks = [asyncio.create_task(self._ask()) for _ in range(self._at_once)]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._ends = True
        await asyncio.gather(*self._tasks)

    async def _ask(self) -> None:
        while not self._ends:
            self._asked += 1
            self.results.append(await self._pool.complete(MESSAGES, self._sampling, 2 * self._asked))

    async def until_answered_by(self, server: str) -> None:
        before = len(self.results)
        await until(lambda: server in {result.server for result in self.results[before:]})


def test_one_is_started_with_the_current_weights_and_stopped_after_its_last_answer(
    local_pool: LocalPool, checkpoint: Checkpoint, sampling: SamplingSettings
) -> None:
    pool = local_pool(checkpoint("a"), 1, server_autoscaling=PLAN)

    async def work() -> list[Any]:
        async with pool:
            async with Load(pool, sampling, 8) as load:
                await load.until_answered_by("vllm-0")
                await pool.sync(checkpoint("b"), 1)
                await load.until_answered_by("vllm-1")
                await pool.sync(checkpoint("c"), 2)
                await load.until_answered_by("vllm-1")
                assert len(pool.replicas) == 2
            server = pool.replicas[1].server
            assert server is not None
            process = server.family()[0]
            await until(lambda: len(pool.replicas) == 1)
            assert not server.alive and not process.is_running()
            assert pool.replicas[0].ready and (await pool.complete(MESSAGES, sampling, 1)).text == "c"
            async with Load(pool, sampling, 8) as again:  # under the name of the one that was stopped
                await again.until_answered_by("vllm-1")
            return load.results

    results = asyncio.run(work())
    assert {(result.text, result.policy_version) for result in results} == {("a", 0), ("b", 1), ("c", 2)}
    counts = pool.statistics.counts()
    assert (counts["joined"], counts["retries"], counts["restarts"], counts["ejections"]) == (2, 0, 0, 0)
    assert not pool.statistics.failures


def test_one_that_is_stopped_answers_first_and_is_not_stopped_while_it_is_lent(
    local_pool: LocalPool, checkpoint: Checkpoint, sampling: SamplingSettings
) -> None:
    pool = local_pool(checkpoint("a"), 1, server_autoscaling=PLAN)

    async def work() -> None:
        async with pool:
            async with pool.lent(8):  # as many as a shard of rollouts may ask at once
                await until(lambda: len(pool.replicas) == 2 and pool.replicas[1].ready)
            async with pool.lent(1) as servers:
                assert len(servers) == 2
                await until(lambda: not pool.replicas[1].ready)
                await asyncio.sleep(0.5)
                assert len(pool.replicas) == 2 and pool.replicas[1].server.alive
            await until(lambda: len(pool.replicas) == 1)

    asyncio.run(work())


def test_one_that_dies_is_started_again_and_one_that_cannot_be_started_is_left_out(
    local_pool: LocalPool, checkpoint: Checkpoint, sampling: SamplingSettings, caplog: pytest.LogCaptureFixture
) -> None:
    weights = checkpoint("a")
    pool = local_pool(weights, 1, server_autoscaling=PLAN)

    async def work() -> None:
        async with pool, Load(pool, sampling, 8) as load:
            await load.until_answered_by("vllm-1")
            kill(pool, 1)
            await until(lambda: pool.statistics.restarts == 1)
            await load.until_answered_by("vllm-1")
            (weights.parent / "refuse").touch()
            kill(pool, 1)
            await until(lambda: pool.statistics.left == 1)
            await load.until_answered_by("vllm-0")
            await asyncio.sleep(1.0)
            assert len(pool.replicas) == 1

    asyncio.run(work())
    assert "vllm-1 cannot be started: the pool gets no more than 1" in caplog.text
    assert pool.statistics.joined == 1 and not pool.statistics.failures


def test_all_end_with_the_pool(local_pool: LocalPool, checkpoint: Checkpoint, sampling: SamplingSettings) -> None:
    pool = local_pool(checkpoint("a"), 1, server_autoscaling=PLAN)

    async def work() -> list[psutil.Process]:
        async with pool, Load(pool, sampling, 8) as load:
            await load.until_answered_by("vllm-1")
            return [replica.server.family()[0] for replica in pool.replicas if replica.server]

    processes = asyncio.run(work())
    assert len(processes) == 2 and not any(process.is_running() for process in processes)


@pytest.mark.parametrize(
    "facts",
    [
        {"endpoints": ["http://10.0.0.7:8000"]},
        {"weight_transfer": "nccl"},
        {"servers": 2},
        {"server_gpus": [[0]]},
        {"max_concurrent": 4},
    ],
)
def test_what_it_cannot_be_set_with(facts: dict[str, Any]) -> None:
    Machine(server_autoscaling=PLAN)
    with refused("value_error", *facts):
        Machine.model_validate({"server_autoscaling": PLAN.model_dump(), **facts})
