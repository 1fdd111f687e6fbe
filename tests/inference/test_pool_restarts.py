"""Local servers that die are started again with the current weights; stand-in programs in vLLM's place."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from armature.components.contracts.machine import Machine
from armature.components.inference.pool import ServerPool
from armature.components.inference.settings import SamplingSettings, ServerSettings
from tests.refusals import codes, refused

MESSAGES = [{"role": "user", "content": "?"}]
STAND_IN = Path(__file__).with_name("stand_in.py")
Checkpoint = Callable[..., Path]


@pytest.fixture
def local_pool(tmp_path: Path) -> Callable[..., ServerPool]:
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nshift 2\nexec {sys.executable} {STAND_IN} "$@"\n')
    python.chmod(0o755)
    settings = ServerSettings(max_model_len=512, max_images_per_prompt=2, dtype="float32")

    def make(weights: Path, servers: int, **facts: Any) -> ServerPool:
        machine = Machine(server_python=python, servers=servers, ready_timeout=30, **facts)
        return ServerPool(weights, settings, machine, tmp_path / "logs")

    return make


def kill(pool: ServerPool, index: int) -> None:
    server = pool.replicas[index].server
    assert server is not None
    server.family()[0].kill()


async def ask_many(pool: ServerPool, sampling: SamplingSettings, count: int) -> list[Any]:
    jobs = (pool.complete(MESSAGES, sampling, 2 * seed) for seed in range(count))
    return await asyncio.gather(*jobs, return_exceptions=True)


@pytest.mark.parametrize("servers", [1, 2])
def test_a_killed_server_is_started_with_the_current_weights(
    servers: int,
    local_pool: Callable[[Path, int], ServerPool],
    checkpoint: Checkpoint,
    sampling: SamplingSettings,
) -> None:
    async def work() -> None:
        async with local_pool(checkpoint("a"), servers) as pool:
            assert {result.text for result in await ask_many(pool, sampling, 4)} == {"a"}
            await pool.sync(checkpoint("b"), 1)
            waiting = asyncio.create_task(ask_many(pool, sampling, 12))
            await asyncio.sleep(0.1)
            kill(pool, 0)
            results = await waiting
            assert {(result.text, result.policy_version) for result in results} == {("b", 1)}
            while not pool.replicas[0].ready:
                await asyncio.sleep(0.05)
            assert pool.statistics.restarts == 1
            assert pool.statistics.completions == 16
            assert not pool.statistics.failures

    asyncio.run(work())


def test_weights_that_change_during_a_restart_reach_the_server(
    local_pool: Callable[[Path, int], ServerPool], checkpoint: Checkpoint, sampling: SamplingSettings
) -> None:
    async def work() -> None:
        async with local_pool(checkpoint("a"), 2) as pool:
            kill(pool, 0)
            while pool.replicas[0].ready:
                await asyncio.sleep(0.01)
            await pool.sync(checkpoint("b"), 1)  # long before the other is back
            while not pool.replicas[0].ready:
                await asyncio.sleep(0.05)
            results = await ask_many(pool, sampling, 8)
            assert {result.server for result in results} == {"vllm-0", "vllm-1"}
            assert {(result.text, result.policy_version) for result in results} == {("b", 1)}

    asyncio.run(work())


def test_a_server_that_does_not_come_back_is_given_up_with_the_reason(
    local_pool: Callable[[Path, int], ServerPool], checkpoint: Checkpoint, sampling: SamplingSettings
) -> None:
    async def work() -> None:
        weights = checkpoint("a")
        async with local_pool(weights, 1) as pool:
            (weights.parent / "refuse").touch()
            waiting = asyncio.create_task(ask_many(pool, sampling, 3))
            await asyncio.sleep(0.1)
            kill(pool, 0)
            for error in await waiting:
                assert (error.code, codes(error.__cause__)) == ("no_server_left", {"server_never_answered"})
                assert "it does not want to" in error.what  # the server's own words

    asyncio.run(work())


def test_one_server_of_several_that_cannot_start_ends_the_others(
    local_pool: Callable[[Path, int], ServerPool], checkpoint: Checkpoint
) -> None:
    weights = checkpoint("a")
    (weights.parent / "refuse").touch()
    pool = local_pool(weights, 2)

    async def work() -> None:
        async with pool:
            raise AssertionError

    with refused("server_ended", "it does not want to"):
        asyncio.run(work())
    assert not any(replica.server and replica.server.alive for replica in pool.replicas)


def test_a_server_is_brought_back_once_there_are_file_handles_again(
    local_pool: Callable[[Path, int], ServerPool], checkpoint: Checkpoint, sampling: SamplingSettings
) -> None:
    async def work() -> None:
        async with local_pool(checkpoint("a"), 1) as pool:
            server = pool.replicas[0].server
            assert server is not None
            victim = server.family()[0].pid
            soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
            taken = []
            resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
            try:
                with contextlib.suppress(OSError):
                    while True:
                        taken.append(os.open(os.devnull, os.O_RDONLY))
                os.kill(victim, signal.SIGKILL)
                while pool.replicas[0].ready or not pool.replicas[0].restarts:
                    await asyncio.sleep(0.05)
            finally:
                for handle in taken:
                    os.close(handle)
                resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            results = await asyncio.wait_for(ask_many(pool, sampling, 4), 30)
            assert {result.text for result in results} == {"a"}

    asyncio.run(work())


def test_a_log_folder_that_cannot_be_written_gives_the_server_up_with_the_reason(
    local_pool: Callable[[Path, int], ServerPool], checkpoint: Checkpoint, sampling: SamplingSettings
) -> None:
    async def work() -> None:
        async with local_pool(checkpoint("a"), 1) as pool:
            shutil.rmtree(pool.log_folder)
            pool.log_folder.write_text("a file is in its place")
            kill(pool, 0)
            with refused("no_server_left", pool.log_folder):
                while True:
                    await asyncio.wait_for(pool.complete(MESSAGES, sampling, 0), 30)

    asyncio.run(work())
