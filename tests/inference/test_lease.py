"""Two runs and one server: one has it, and no completion of the other's weights is taken for its own."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import httpx
import pytest

from armature.components.inference.client import Completion
from armature.components.inference.lease import in_order
from armature.components.inference.pool import ServerPool
from tests.inference.conftest import ask_many, texts
from tests.refusals import codes, refused

pytestmark = pytest.mark.waits

KEY = {"Authorization": "Bearer a-key"}
OTHER = "b" * 32


async def load(server: Any, weights: Path, **headers: str) -> int:
    """Make a server load weights, as a client that has the API key but not the lease. Return the HTTP status."""
    body = {"method": "reload_weights", "kwargs": {"weights_path": str(weights)}}
    async with httpx.AsyncClient(trust_env=False) as http:
        return (await http.post(f"{server.url}/collective_rpc", json=body, headers=KEY | headers)).status_code


async def lease(server: Any, method: str, holder: str, seconds: float = 30.0) -> httpx.Response:
    body = {"holder": holder, "who": "someone", "seconds": seconds}
    async with httpx.AsyncClient(trust_env=False) as http:
        return await http.request(method, f"{server.url}/armature/lease", json=body, headers=KEY)


async def take_over(server: Any, weights: Path) -> None:
    """Let the lease expire, as if our run had been suspended. Then another run takes it, loads weights and releases
    it."""
    server.lease._ends = 0.0
    assert (await lease(server, "POST", OTHER)).status_code == 200
    assert await load(server, weights, **{"X-Armature-Lease": OTHER}) == 200
    assert (await lease(server, "DELETE", OTHER)).status_code == 200


@pytest.mark.parametrize(
    ("marks", "expected"),
    [
        (("a-1", "a-1", "a-1"), True),
        (("a-1", "a-3", "a-12"), True),
        (("a-b-1", "a-b-3"), True),
        (("a-3", "a-1"), False),
        (("a-1", "a-13", "a-12"), False),
        (("a-1", "b-2", "b-3"), False),
        (("a-1", "", "a-3"), False),
        (("", ""), False),
        (("a-1", "a-x"), False),
        (("a-1", "a--2"), False),
        (("a-1", "a-²"), False),
    ],
)
def test_weights_ids_increase_while_a_server_lives(marks, expected):
    assert in_order(*marks) == expected


@pytest.mark.parametrize("then_synced", [False, True])
def test_answers_of_other_weights_are_not_in_flight_updates(then_synced, join, checkpoint):
    (server,), pool = join(1, in_flight_updates=True)
    server.delay = 0.5
    foreign, newer = checkpoint("foreign"), checkpoint("b")

    async def work() -> list[Any]:
        async with pool:
            asking = asyncio.create_task(ask_many(pool))
            await asyncio.sleep(0.1)
            await take_over(server, foreign)
            if then_synced:
                assert (await lease(server, "POST", pool.lease)).status_code == 200
                await pool.sync(newer, 1)
            return await asking

    answers = texts(asyncio.run(work()))
    if then_synced:  # with version 0 if the server was back before the sync, which then changed the weights in flight
        assert answers <= {("b", 0), ("b", 1)} and answers
    else:
        assert answers == {("a", 0)}
    assert pool.statistics.retries >= 4 and pool.statistics.continued == 0


async def test_second_run_is_refused_with_the_holder_of_the_server(join, make_pool, checkpoint):
    (server,), pool = join(1)
    first, second = pool, make_pool([server], checkpoint("b"))
    async with first:
        with refused("server_in_use", server.url, f"process {os.getpid()}", "logs"):
            async with second:
                await second.sync(checkpoint("c"), 1)
        assert texts(await ask_many(first)) == {("a", 0)}
    async with second:
        assert texts(await ask_many(second)) == {("b", 0)}


async def test_second_run_can_wait_for_the_first(join, make_pool, checkpoint):
    (server,), pool = join(1)
    first, second = pool, make_pool([server], checkpoint("b"), lease_timeout=60)

    async def wait() -> list[Any]:
        async with second:
            return await ask_many(second)

    async with first:
        waiting = asyncio.create_task(wait())
        await asyncio.sleep(2)
        assert texts(await ask_many(first)) == {("a", 0)}
    assert texts(await waiting) == {("b", 0)}


async def test_waiting_runs_take_turns(stand_ins, make_pool, checkpoint, monkeypatch, caplog):
    """Servers that come free one after the other must not be shared out to runs that then wait for each other."""
    from armature.components.inference import lease as ours

    monkeypatch.setattr(ours, "ASK_EVERY", 0.2)
    servers = stand_ins(2)
    one, other = sorted(servers, key=lambda server: server.url)
    pools = [
        make_pool(arguments, checkpoint(name), lease_timeout=4)
        for name, arguments in (("a", servers), ("b", servers[::-1]))
    ]

    async def work(pool: ServerPool, wait: float) -> list[Any]:
        await asyncio.sleep(wait)
        async with pool:
            return await ask_many(pool)

    for server in servers:
        assert (await lease(server, "POST", OTHER)).status_code == 200
    running = [asyncio.create_task(work(pool, wait)) for pool, wait in zip(pools, (0.0, 0.1), strict=True)]
    await asyncio.sleep(1.05)
    await lease(one, "DELETE", OTHER)
    await asyncio.sleep(0.1)
    await lease(other, "DELETE", OTHER)
    first, second = await asyncio.gather(*running)
    assert texts(first) == {("a", 0)} and texts(second) == {("b", 0)}
    assert f"waiting for the server at {one.url}, which another run uses: someone" in caplog.text


async def test_server_of_a_killed_run_is_free_after_its_lease(join):
    (server,), pool = join(1)
    assert (await lease(server, "POST", OTHER, seconds=2.5)).status_code == 200
    async with pool:
        assert texts(await ask_many(pool)) == {("a", 0)}


async def test_lease_is_renewed_without_requests(join, monkeypatch):
    from armature.components.inference import lease as ours

    monkeypatch.setattr(ours, "SECONDS", 1.0)
    monkeypatch.setattr(ours, "KEEP_EVERY", 0.2)
    (server,), pool = join(1)
    async with pool:
        await asyncio.sleep(2.5)
        assert (await lease(server, "POST", OTHER)).status_code == 409
    assert (await lease(server, "POST", OTHER)).status_code == 200


async def test_leased_server_refuses_other_runs(join, checkpoint):
    (server,), pool = join(1)
    async with pool:
        assert await load(server, checkpoint("foreign")) == 423
        assert await load(server, checkpoint("worse"), **{"X-Armature-Lease": OTHER}) == 423
        assert texts(await ask_many(pool)) == {("a", 0)}
        await pool.sync(checkpoint("b"), 1)
        assert texts(await ask_many(pool)) == {("b", 1)}


@pytest.mark.parametrize("regained", [False, True])
async def test_foreign_weights_are_replaced_by_ours(regained, join, checkpoint):
    (server,), pool = join(1)
    async with pool:
        await pool.sync(checkpoint("b"), 1)
        await take_over(server, checkpoint("foreign"))
        if regained:
            assert (await lease(server, "POST", pool.lease)).status_code == 200
        assert server.version == "foreign"
        assert texts(await ask_many(pool)) == {("b", 1)}
        assert pool.statistics.ejections == 1


async def test_answer_during_a_foreign_sync_is_discarded(join, checkpoint):
    (server,), pool = join(1)
    async with pool:
        server.delay = 2.0
        asking = asyncio.create_task(ask_many(pool))
        while server.at_once < 4:
            await asyncio.sleep(0.01)
        server.delay = 0.0
        await take_over(server, checkpoint("foreign"))
        assert texts(await asking) == {("a", 0)}
        assert pool.statistics.retries >= 4


async def test_unnoticed_restart_gets_current_weights(join, checkpoint):
    (server,), pool = join(1)
    async with pool:
        await pool.sync(checkpoint("b"), 1)
        server.start_again()
        assert texts(await ask_many(pool)) == {("b", 1)}


async def test_pool_drops_a_server_whose_weights_another_client_replaced(join, checkpoint):
    (server,), pool = join(1, plain=True)
    async with pool:
        assert texts(await ask_many(pool)) == {("a", 0)}
        await pool.sync(checkpoint("b"), 1)
        assert texts(await ask_many(pool)) == {("b", 1)}
        server.delay = 0.3
        asking = asyncio.create_task(ask_many(pool))
        await asyncio.sleep(0.1)
        assert await load(server, checkpoint("foreign")) == 200
        results = await asking + await ask_many(pool)
        assert not [result for result in results if isinstance(result, Completion)]
        assert "no_server_left" in set().union(*map(codes, results))


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"[" * 3000,
        b"x" * 10_000,
        b'{"holder": 3, "who": "x", "seconds": 1}',
        b'{"holder": "short", "who": "x", "seconds": 1}',
        '{"holder": "éééééééééééééééé", "who": "x", "seconds": 1}'.encode(),
        b'{"holder": "%s", "who": "x", "seconds": true}' % (b"a" * 32),
        b'{"holder": "%s", "who": "x", "seconds": 1e9}' % (b"a" * 32),
        b'{"holder": "%s", "who": "x", "seconds": NaN}' % (b"a" * 32),
        b'{"holder": "%s", "who": null, "seconds": 1}' % (b"a" * 32),
    ],
)
def test_malformed_request_gets_no_lease(body, stand_ins):
    (server,) = stand_ins(1)
    with httpx.Client(base_url=server.url, headers=KEY, trust_env=False) as http:
        assert http.post("/armature/lease", content=body).status_code == 400
        assert http.get("/armature/lease").json()["held"] is False
        http.post("/armature/lease", json={"holder": OTHER, "who": "someone", "seconds": 5})
        state = http.get("/armature/lease")
        assert state.json()["who"] == "someone" and OTHER not in state.text
    assert httpx.get(f"{server.url}/armature/lease", trust_env=False).status_code == 401
