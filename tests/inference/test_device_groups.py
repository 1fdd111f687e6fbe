"""Servers that are lost and come back while only a trainer's GPUs have the current weights; stand-in servers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from armature.components.contracts.errors import WeightSyncError
from armature.components.inference.endpoint import Endpoint
from armature.components.inference.pool import ServerPool
from armature.components.inference.settings import SamplingSettings
from armature.components.inference.weights import Publish
from tests.refusals import refused

MESSAGES = [{"role": "user", "content": "?"}]
MakePool = Callable[..., ServerPool]
StandIns = Callable[..., list[Any]]
Checkpoint = Callable[..., Path]


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.02)


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
            await pool.sync(Path("unread"), 5, trainer.sends("f"))
            answers = await asyncio.gather(*(pool.complete(MESSAGES, sampling, 2 * seed) for seed in range(8)))
            assert {(answer.text, answer.server) for answer in answers} == {("f", first.url), ("f", second.url)}

    asyncio.run(work())
    both = {first.url, second.url}
    assert trainer.urls == [both, {first.url}, {first.url}, both, both]
    assert trainer.groups[3] == trainer.groups[4], "a group lasts while its servers stay"


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
    stand_ins: StandIns, make_pool: MakePool, checkpoint: Checkpoint
) -> None:
    first, second = stand_ins(2)
    trainer = Trainer(first, second)

    async def work() -> None:
        async with make_pool([first, second], checkpoint("a"), weight_transfer="nccl") as pool:
            second.healthy = False
            await pool.sync(Path("unread"), 1, trainer.sends("b"))
            second.healthy = True
            await until(lambda: pool.replicas[1].waits)

            async def to_the_first_alone(endpoints: Sequence[Endpoint]) -> None:
                await trainer.sends("c")(endpoints[:1])

            with refused("served_weights_differ"):
                await pool.sync(Path("unread"), 2, to_the_first_alone)

    asyncio.run(work())
