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

from armature.components.inference.pool import ServerPool
from armature.components.inference.settings import ServerSettings
from tests.builders import make_machine
from tests.inference.conftest import MESSAGES, SAMPLING, ask_many, texts
from tests.refusals import codes, refused

pytestmark = pytest.mark.waits

STAND_IN = Path(__file__).with_name("stand_in.py")


@pytest.fixture
def local_pool(tmp_path) -> Callable[..., ServerPool]:
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nshift 2\nexec {sys.executable} {STAND_IN} "$@"\n')
    python.chmod(0o755)
    settings = ServerSettings(max_model_len=512, max_images_per_prompt=2, dtype="float32")

    def make(weights: Path, servers: int, **facts: Any) -> ServerPool:
        machine = make_machine(servers__python=python, servers__count=servers, ready_timeout=30, **facts)
        return ServerPool(weights, settings, machine, tmp_path / "logs")

    return make


def kill(pool: ServerPool, index: int) -> None:
    server = pool.replicas[index].server
    server.family()[0].kill()


@pytest.mark.parametrize("servers", [1, 2])
async def test_killed_server_restarts_with_current_weights(servers, local_pool, checkpoint):
    async with local_pool(checkpoint("a"), servers) as pool:
        assert {result.text for result in await ask_many(pool, 4)} == {"a"}
        await pool.sync(checkpoint("b"), 1)
        waiting = asyncio.create_task(ask_many(pool, 12))
        await asyncio.sleep(0.1)
        kill(pool, 0)
        results = await waiting
        assert texts(results) == {("b", 1)}
        while not pool.replicas[0].ready:
            await asyncio.sleep(0.05)
        assert pool.statistics.restarts == 1
        assert pool.statistics.completions == 16
        assert not pool.statistics.failures


async def test_weights_changed_during_a_restart_reach_the_server(local_pool, checkpoint):
    async with local_pool(checkpoint("a"), 2) as pool:
        kill(pool, 0)
        while pool.replicas[0].ready:
            await asyncio.sleep(0.01)
        await pool.sync(checkpoint("b"), 1)  # long before the other is back
        while not pool.replicas[0].ready:
            await asyncio.sleep(0.05)
        results = await ask_many(pool, 8)
        assert {result.server for result in results} == {"vllm-0", "vllm-1"}
        assert texts(results) == {("b", 1)}


async def test_server_that_cannot_restart_is_given_up_with_the_reason(local_pool, checkpoint):
    weights = checkpoint("a")
    async with local_pool(weights, 1) as pool:
        (weights.parent / "refuse").touch()
        waiting = asyncio.create_task(ask_many(pool, 3))
        await asyncio.sleep(0.1)
        kill(pool, 0)
        for error in await waiting:
            assert (error.code, codes(error.__cause__)) == ("no_server_left", {"server_never_answered"})
            assert "it does not want to" in error.what  # the server's own words


async def test_server_that_cannot_start_stops_the_others(local_pool, checkpoint):
    weights = checkpoint("a")
    (weights.parent / "refuse").touch()
    pool = local_pool(weights, 2)
    with refused("server_ended", "it does not want to"):
        async with pool:
            raise AssertionError
    assert not any(replica.server and replica.server.alive for replica in pool.replicas)


async def test_server_restarts_once_file_handles_are_free(local_pool, checkpoint):
    async with local_pool(checkpoint("a"), 1) as pool:
        server = pool.replicas[0].server
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
        results = await asyncio.wait_for(ask_many(pool, 4), 30)
        assert {result.text for result in results} == {"a"}


async def test_unwritable_log_folder_gives_the_server_up(local_pool, checkpoint):
    async with local_pool(checkpoint("a"), 1) as pool:
        shutil.rmtree(pool.log_folder)
        pool.log_folder.write_text("a file is in its place")
        kill(pool, 0)
        with refused("no_server_left", pool.log_folder):
            while True:
                await asyncio.wait_for(pool.complete(MESSAGES, SAMPLING, 0), 30)
