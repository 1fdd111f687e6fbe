"""Servers that are lost and come back while only a trainer's GPUs have the current weights; stand-in servers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from armature.components.contracts.errors import WeightSyncError
from armature.components.inference.replies import Endpoint
from armature.components.inference.weights import Publish
from tests.inference.conftest import MESSAGES, SAMPLING
from tests.refusals import refused


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.02)


class Trainer:
    """Replaces a trainer that sends weights from its GPUs. It sets the weights of the stand-in servers directly.

    `groups` records the endpoints of each transfer.
    """

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


async def test_single_restarted_server_is_reconnected(join):
    """The pool sent no request after the restart, so it had not noticed it."""
    (server,), pool = join(1, weight_transfer="nccl")
    trainer = Trainer(server)
    async with pool:
        await pool.sync(Path("unread"), 1, trainer.sends("b"))
        server.start_again()
        await pool.sync(Path("unread"), 2, trainer.sends("c"))
        answer = await pool.complete(MESSAGES, SAMPLING, 1)
        assert (answer.text, answer.policy_version) == ("c", 2)
    (before,), (after,) = trainer.groups
    assert before.url == after.url and before != after


async def test_unhealthy_server_misses_a_sync_and_gets_the_next(join):
    (first, second), pool = join(2, weight_transfer="nccl")
    trainer = Trainer(first, second)
    async with pool:
        await pool.sync(Path("unread"), 1, trainer.sends("b"))
        second.healthy = False
        await pool.sync(Path("unread"), 2, trainer.sends("c"))
        second.healthy = True
        await until(lambda: pool.replicas[1].waits)
        assert {(await pool.complete(MESSAGES, SAMPLING, 2 * seed)).text for seed in range(4)} == {"c"}
        assert second.version == "b" and not second.answered
        second.healthy = False  # while it waits
        await pool.sync(Path("unread"), 3, trainer.sends("d"))
        second.healthy = True
        await until(lambda: pool.replicas[1].waits)
        await pool.sync(Path("unread"), 4, trainer.sends("e"))
        await until(lambda: pool.replicas[1].ready)
        await pool.sync(Path("unread"), 5, trainer.sends("f"))
        answers = await asyncio.gather(*(pool.complete(MESSAGES, SAMPLING, 2 * seed) for seed in range(8)))
        assert {(answer.text, answer.server) for answer in answers} == {("f", first.url), ("f", second.url)}
    both = {first.url, second.url}
    assert trainer.urls == [both, {first.url}, {first.url}, both, both]
    assert trainer.groups[3] == trainer.groups[4], "a group lasts while its servers stay"


async def test_request_for_missing_weights_is_an_error(join):
    """The request cannot wait for the next sync, because the sync waits for running requests."""
    (server,), pool = join(1, weight_transfer="nccl")
    trainer = Trainer(server)
    async with pool:
        await pool.sync(Path("unread"), 1, trainer.sends("b"))
        server.start_again()
        with refused("no_current_server", server.url):
            await pool.complete(MESSAGES, SAMPLING, 1)
        await pool.sync(Path("unread"), 2, trainer.sends("c"))
        assert (await pool.complete(MESSAGES, SAMPLING, 3)).text == "c"


async def test_sync_fails_if_no_server_returns(join):
    (server,), pool = join(1, weight_transfer="nccl", ready_timeout=1.0)
    trainer = Trainer(server)
    async with pool:
        await pool.sync(Path("unread"), 1, trainer.sends("b"))
        server.healthy = False
        with refused("no_server_left", server.url, kind=WeightSyncError):
            await pool.sync(Path("unread"), 2, trainer.sends("c"))
    assert len(trainer.groups) == 1


async def test_missing_weights_fail_the_sync_of_a_waiting_server(join):
    (first, second), pool = join(2, weight_transfer="nccl")
    trainer = Trainer(first, second)
    async with pool:
        second.healthy = False
        await pool.sync(Path("unread"), 1, trainer.sends("b"))
        second.healthy = True
        await until(lambda: pool.replicas[1].waits)

        async def to_the_first_alone(endpoints: Sequence[Endpoint]) -> None:
            await trainer.sends("c")(endpoints[:1])

        with refused("served_weights_differ"):
            await pool.sync(Path("unread"), 2, to_the_first_alone)
