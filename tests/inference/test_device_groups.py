"""Servers that come and go while only a trainer's GPUs have the current weights; against stand-in servers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from armature.components.contracts.errors import WeightSyncError
from armature.components.inference import members
from armature.components.inference.endpoint import Endpoint
from armature.components.inference.pool import ServerPool
from armature.components.inference.settings import SamplingSettings
from armature.components.inference.weights import Publish
from tests.refusals import refused

from .test_endpoints_file import MESSAGES, Asking, until, write

MakePool = Callable[..., ServerPool]
StandIns = Callable[..., list[Any]]
Checkpoint = Callable[..., Path]


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(members, "READ_EVERY", 0.05)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "servers.txt"


class Trainer:
    """Stands in for a trainer's GPUs: the servers that it is asked to send to have its weights."""

    def __init__(self, *servers: Any) -> None:
        self._servers = {server.url: server for server in servers}
        self.groups: list[list[Endpoint]] = []

    def sends(self, weights: str) -> Publish:
        async def publish(endpoints: Sequence[Endpoint]) -> None:
            self.groups.append(list(endpoints))
            for endpoint in endpoints:
                self._servers[endpoint.url].version = weights

        return publish

    @property
    def urls(self) -> list[set[str]]:
        return [{endpoint.url for endpoint in group} for group in self.groups]


def test_one_that_is_added_takes_part_after_the_next_sync(
    stand_ins: StandIns, make_pool: MakePool, checkpoint: Checkpoint, sampling: SamplingSettings, file: Path
) -> None:
    first, second = stand_ins(2)
    first.delay = second.delay = 0.02
    trainer, unread = Trainer(first, second), file.parent / "unread"
    write(file, first)
    pool = make_pool([], checkpoint("a"), endpoints_file=file, weight_transfer="nccl")

    async def work() -> list[Any]:
        async with pool, Asking(pool, sampling) as asking:
            await pool.sync(unread, 1, trainer.sends("b"))
            write(file, first, second)
            await until(lambda: len(pool.replicas) == 2 and pool.replicas[1].waits)
            assert await asking.more() == {first.url}
            await pool.sync(unread, 2, trainer.sends("c"))
            await until(lambda: pool.replicas[1].ready)
            assert await asking.more() == {first.url, second.url}
            await pool.sync(unread, 3, trainer.sends("d"))
            write(file, second)
            await until(lambda: pool.statistics.left == 1)
            await pool.sync(unread, 4, trainer.sends("e"))
            assert await asking.more() == {second.url}
        return asking.results

    results = asyncio.run(work())
    both = {first.url, second.url}
    assert trainer.urls == [{first.url}, both, both, {second.url}]
    assert trainer.groups[1] == trainer.groups[2], "a group lasts while its servers stay"
    told = {("start", 0), ("b", 1), ("c", 2), ("d", 3), ("e", 4)}
    assert {(result.text, result.policy_version) for result in results} <= told
    assert {result.text for result in results if result.server == second.url} <= {"c", "d", "e"}
    counts = pool.statistics.counts()
    assert counts["completions"] == len(results) == first.answered.total() + second.answered.total()
    assert (counts["retries"], counts["ejections"]) == (0, 0)


def test_the_only_one_that_was_started_again_is_waited_for_and_connected_to_again(
    stand_ins: StandIns, make_pool: MakePool, checkpoint: Checkpoint, sampling: SamplingSettings
) -> None:
    """Nobody asked it since, so nobody knew."""
    (server,) = stand_ins(1)
    trainer = Trainer(server)

    async def work() -> None:
        async with make_pool([server], checkpoint("a"), weight_transfer="nccl") as pool:
            await pool.sync(Path("unread"), 1, trainer.sends("b"))
            server.start_again()
            await pool.sync(Path("unread"), 2, trainer.sends("c"))
            answer = await pool.complete(MESSAGES, sampling, 1)
            assert (answer.text, answer.policy_version) == ("c", 2)

    asyncio.run(work())
    (before,), (after,) = trainer.groups
    assert before.url == after.url and before != after


def test_one_that_is_unhealthy_is_left_out_of_a_sync_and_gets_the_next_weights(
    stand_ins: StandIns, make_pool: MakePool, checkpoint: Checkpoint, sampling: SamplingSettings
) -> None:
    first, second = stand_ins(2)
    trainer = Trainer(first, second)

    async def work() -> None:
        pool = make_pool([first, second], checkpoint("a"), weight_transfer="nccl")
        async with pool:
            await pool.sync(Path("unread"), 1, trainer.sends("b"))
            second.healthy = False
            await pool.sync(Path("unread"), 2, trainer.sends("c"))
            second.healthy = True
            await until(lambda: pool.replicas[1].waits)
            assert {(await pool.complete(MESSAGES, sampling, 2 * seed)).text for seed in range(4)} == {"c"}
            assert second.version == "b" and not second.answered
            second.healthy = False  # while it waits
            await pool.sync(Path("unread"), 3, trainer.sends("d"))
            second.healthy = True
            await until(lambda: pool.replicas[1].waits)
            await pool.sync(Path("unread"), 4, trainer.sends("e"))
            await until(lambda: pool.replicas[1].ready)

    asyncio.run(work())
    both = {first.url, second.url}
    assert trainer.urls == [both, {first.url}, {first.url}, both]


def test_a_request_that_no_server_has_the_weights_for_is_told_so(
    stand_ins: StandIns, make_pool: MakePool, checkpoint: Checkpoint, sampling: SamplingSettings
) -> None:
    """The next sync waits for it, so it cannot wait for the next sync."""
    (server,) = stand_ins(1)
    trainer = Trainer(server)

    async def work() -> None:
        async with make_pool([server], checkpoint("a"), weight_transfer="nccl") as pool:
            await pool.sync(Path("unread"), 1, trainer.sends("b"))
            server.start_again()
            with refused("no_current_server", server.url):
                await pool.complete(MESSAGES, sampling, 1)
            await pool.sync(Path("unread"), 2, trainer.sends("c"))
            assert (await pool.complete(MESSAGES, sampling, 3)).text == "c"

    asyncio.run(work())


def test_when_none_comes_back_the_sync_says_so(
    stand_ins: StandIns, make_pool: MakePool, checkpoint: Checkpoint
) -> None:
    (server,) = stand_ins(1)
    trainer = Trainer(server)

    async def work() -> None:
        pool = make_pool([server], checkpoint("a"), weight_transfer="nccl", ready_timeout=1.0)
        async with pool:
            await pool.sync(Path("unread"), 1, trainer.sends("b"))
            server.healthy = False
            with refused("no_server_left", server.url, kind=WeightSyncError):
                await pool.sync(Path("unread"), 2, trainer.sends("c"))

    asyncio.run(work())
    assert len(trainer.groups) == 1


def test_weights_that_did_not_arrive_fail_the_sync_of_one_that_waited(
    stand_ins: StandIns, make_pool: MakePool, checkpoint: Checkpoint, file: Path
) -> None:
    first, second = stand_ins(2)
    trainer = Trainer(first, second)
    write(file, first)

    async def work() -> None:
        async with make_pool([], checkpoint("a"), endpoints_file=file, weight_transfer="nccl") as pool:
            await pool.sync(Path("unread"), 1, trainer.sends("b"))
            write(file, first, second)
            await until(lambda: len(pool.replicas) == 2 and pool.replicas[1].waits)

            async def to_the_first_alone(endpoints: Sequence[Endpoint]) -> None:
                await trainer.sends("c")(endpoints[:1])

            with refused("served_weights_differ"):
                await pool.sync(Path("unread"), 2, to_the_first_alone)

    asyncio.run(work())
