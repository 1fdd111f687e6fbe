"""The pool handles stand-in servers that hang, fail, die or answer wrongly."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from armature.components.contracts.errors import ServerError, WeightSyncError
from armature.components.inference.client import GenerationFailure
from armature.components.inference.pool import ServerPool
from armature.tasks.prometheus import RunCollector
from tests.inference.conftest import MESSAGES, SAMPLING, ask_many, texts
from tests.refusals import codes, refused

pytestmark = pytest.mark.waits


def run(pool: ServerPool, work: Callable[[ServerPool], Any]) -> Any:
    async def inside() -> Any:
        async with pool:
            return await work(pool)

    return asyncio.run(inside())


async def test_completion_has_tokens_and_policy_version(stand_ins, make_pool, checkpoint):
    (server,) = stand_ins(1)
    pool = make_pool([server], checkpoint("v7"))
    async with pool:
        one, four = await pool.complete(MESSAGES, SAMPLING, 11), await pool.sample(MESSAGES, SAMPLING, 12, n=4)
    assert one.prompt_token_ids.tolist() == [1, 7, 7, 7, 2]
    assert one.prompt_token_ids.dtype == one.token_ids.dtype == np.int32
    assert one.token_ids.tolist() == [3, 4, 5]
    assert one.logprobs.dtype == np.float32
    assert one.logprobs.tolist() == [-0.5, -1.0, 0.0]
    assert (one.finish_reason, one.policy_version, one.text) == ("stop", 0, "v7")
    assert len(four) == 4
    body = server.bodies[0]
    assert body["seed"] == 11
    assert body["logit_bias"] == {"7": -100.0, "8": -100.0}
    assert (body["top_p"], body["top_k"], body["min_p"], body["repetition_penalty"]) == (1.0, 0, 0.0, 1.0)
    assert body["logprobs"] and body["return_token_ids"] and not body["skip_special_tokens"]
    assert pool.statistics.completions == 5


async def test_requests_go_to_the_least_loaded_server(join):
    servers, pool = join(2, max_concurrent=6)
    servers[0].delay, servers[1].delay = 0.05, 0.2
    async with pool:
        results = await ask_many(pool, 40)
    assert all(result.text for result in results)
    assert servers[0].seen > 1.8 * servers[1].seen > 0
    assert servers[0].most_at_once + servers[1].most_at_once <= 7
    assert max(server.most_at_once for server in servers) <= 5


async def test_closing_the_pool_ends_requests_without_retry(join, caplog):
    (server,), pool = join(1)
    server.delay = 60.0
    async with pool:
        waiting = asyncio.create_task(ask_many(pool, 3))
        while server.seen < 3:
            await asyncio.sleep(0.01)
    results = await asyncio.wait_for(waiting, 5)
    assert [result.code for result in results] == ["pool_closed"] * 3
    assert pool.statistics.retries == 0
    assert "attempt" not in caplog.text


@pytest.mark.parametrize("fault", ["500", "die", "hang", "not json"])
async def test_failed_request_is_retried_on_another_server(fault, join):
    servers, pool = join(2)
    servers[0].misbehave(fault)
    async with pool:
        results = await ask_many(pool, 12)
    assert [result.server for result in results] == [servers[1].url] * 12
    assert sum(servers[1].answered.values()) == 12
    assert pool.statistics.completions == pool.statistics.requests == 12
    assert pool.statistics.retries >= 3
    assert (pool.statistics.timeouts > 0) == (fault == "hang")
    assert pool.statistics.ejections >= 1
    assert not pool.statistics.failures


async def test_open_pool_is_counted_for_prometheus(join):
    servers, pool = join(2)
    servers[0].misbehave("500", 1)

    def seen() -> dict[tuple[str, ...], float]:
        samples = (sample for family in RunCollector().collect() for sample in family.samples)
        return {(sample.name, *sample.labels.values()): sample.value for sample in samples}

    async with pool:
        await ask_many(pool, 6)
        pool.statistics.failed("timeout", 3)
        numbers = seen()
    assert numbers["armature_pool_servers",] == 2 and numbers["armature_pool_in_flight",] == 0
    assert numbers["armature_pool_requests_total",] == 7 and numbers["armature_pool_retries_total",] == 1
    assert numbers["armature_pool_completion_tokens_total",] == 6 * 3
    assert numbers["armature_pool_failures_total", "timeout"] == 3
    assert seen()["armature_pool_servers",] == 0


async def test_permanently_failing_server_gives_typed_failures(join):
    (server,), pool = join(1)
    server.misbehave("500")
    async with pool:
        results = await ask_many(pool, 3)
    assert [result.reason for result in results] == ["server_error"] * 3
    assert pool.statistics.failures == {"server_error": 3}
    assert "EngineCore" in results[0].what  # the server's own words


async def test_refused_prompt_fails_only_its_request(join):
    (server,), pool = join(1)
    server.misbehave("400", count=1)
    async with pool:
        results = await ask_many(pool, 5)
    failures = [result for result in results if isinstance(result, GenerationFailure)]
    assert [failure.reason for failure in failures] == ["prompt_too_long"]
    assert server.seen == 5 and pool.statistics.completions == 4
    assert pool.statistics.failures == {"prompt_too_long": 1} and pool.statistics.ejections == 0


@pytest.mark.parametrize("role", ["system", "user", "assistant"])
@pytest.mark.parametrize("parts", [True, False])
def test_prompt_with_placeholder_text_is_not_sent(role, parts, stand_ins, make_pool, checkpoint):
    (server,) = stand_ins(1)
    folder = checkpoint("a")
    tokens = [{"id": number, "content": text} for number, text in ((7, "<pad>"), (9, "<end>"))]
    (folder / "tokenizer.json").write_text(json.dumps({"added_tokens": tokens}))
    pool = make_pool([server], folder)

    async def work(pool: ServerPool) -> Any:
        for text in ("an <end>", "a <pad>"):
            content = [{"type": "text", "text": text}] if parts else text
            try:
                await pool.complete([{"role": role, "content": content}], SAMPLING, 1)
            except GenerationFailure as failure:
                return text, failure.reason
        return "sent", ""

    assert run(pool, work) == ("a <pad>", "reserved_token")
    assert server.seen == 1 and pool.statistics.failures == {"reserved_token": 1}


async def test_ejected_server_returns_with_current_weights(join, checkpoint):
    servers, pool = join(2)
    newer = checkpoint("b")
    async with pool:
        servers[0].healthy = False
        servers[0].misbehave("500")
        await ask_many(pool, 8)
        await pool.sync(newer, 1)
        assert (servers[0].version, servers[1].version) == ("a", "b")
        servers[0].healthy = True
        servers[0].misbehave("")
        while not all(replica.ready for replica in pool.replicas):
            await asyncio.sleep(0.05)
        results = await ask_many(pool, 20)
        assert {result.server for result in results} == {server.url for server in servers}
        assert texts(results) == {("b", 1)}


async def test_joined_server_that_stays_away_is_given_up(join, checkpoint):
    (first, second), pool = join(2, ready_timeout=1.0)
    async with pool:
        second.healthy = False
        second.misbehave("500")
        results = []
        while pool.replicas[1].given_up is None:
            results += await ask_many(pool, 4)
        await pool.sync(checkpoint("b"), 1)
        results = results + await ask_many(pool, 4)
    assert {result.server for result in results} == {first.url}
    assert texts(results) == {("a", 0), ("b", 1)}


async def test_wrong_key_is_an_immediate_error(stand_ins, make_pool, checkpoint, monkeypatch):
    servers = stand_ins(1)
    monkeypatch.setenv("VLLM_API_KEY", "another")  # a pool reads it when it is made
    with refused("server_key_refused", servers[0].url):
        async with make_pool(servers, checkpoint("a"), ready_timeout=1) as pool:
            await pool.notify()


@pytest.mark.parametrize("kind", ["image_url", "video_url"])
async def test_server_never_fetches_images(kind, join):
    (server,), pool = join(1)
    part = {"type": kind, kind: {"url": "http://example.org/a.png"}}
    with refused("image_not_inline", "http://example.org/a.png"):
        async with pool:
            await pool.complete([{"role": "user", "content": [part]}], SAMPLING, 0)
    assert server.seen == 0


# Weights


async def test_sync_waits_for_requests_and_sets_the_version(join, checkpoint):
    servers, pool = join(2)
    for server in servers:
        server.delay = 0.3
    newer = checkpoint("b")
    async with pool:
        before = asyncio.create_task(ask_many(pool, 6))
        await asyncio.sleep(0.1)
        sync = asyncio.create_task(pool.sync(newer, 5))
        await asyncio.sleep(0.05)
        after = asyncio.create_task(ask_many(pool, 6))
        await sync
        before, after = await before, await after
    assert texts(before) == {("a", 0)}
    assert texts(after) == {("b", 5)}
    for server in servers:
        assert server.calls[-4:-3] == ["/collective_rpc"]
        assert set(server.calls[-3:]) == {"/reset_prefix_cache", "/reset_mm_cache", "/reset_encoder_cache"}


async def test_in_flight_requests_continue_with_new_weights(join, checkpoint):
    servers, pool = join(2, in_flight_updates=True)
    for server in servers:
        server.delay = 0.5
    newer = checkpoint("b")
    async with pool:
        before = asyncio.create_task(ask_many(pool, 6))
        await asyncio.sleep(0.1)
        for server in servers:
            server.calls.clear()
        await pool.sync(newer, 5)
        assert pool.in_flight == 6
        before, after = await before, await ask_many(pool, 6)
    assert texts(before) == {("b", 0)}
    assert texts(after) == {("b", 5)}
    assert (pool.statistics.continued, pool.statistics.retries, pool.statistics.completions) == (6, 0, 12)
    for server in servers:
        forgets = ["/reset_prefix_cache", "/reset_encoder_cache"]
        assert server.calls == ["/pause", *forgets, "/collective_rpc", "/resume"]


async def test_in_flight_sync_waits_for_direct_access_requests(join, checkpoint):
    servers, pool = join(1, in_flight_updates=True)
    servers[0].delay = 0.2
    newer = checkpoint("b")
    async with pool:
        asking = asyncio.create_task(ask_many(pool, 1))
        await asyncio.sleep(0.05)
        async with pool.direct_access(3):
            sync = asyncio.create_task(pool.sync(newer, 1))
            await asyncio.gather(asking)
            await asyncio.sleep(0.1)
            assert not sync.done() and servers[0].version != "b"
        await sync
    assert servers[0].version == "b"


async def test_in_flight_sync_waits_for_servers_without_weights_id(join, checkpoint):
    (server,), pool = join(1, plain=True, in_flight_updates=True)
    server.delay = 0.3
    newer = checkpoint("b")
    async with pool:
        before = asyncio.create_task(ask_many(pool, 4))
        await asyncio.sleep(0.1)
        await pool.sync(newer, 1)
        assert before.done()
        before, after = await before, await ask_many(pool, 1)
    assert texts(before) == {("a", 0)}
    assert (after[0].text, after[0].policy_version) == ("b", 1)


async def test_failed_sync_leaves_no_server_paused(join, checkpoint):
    servers, pool = join(2, in_flight_updates=True)
    for server in servers:
        server.delay = 0.3
    async with pool:
        asked = asyncio.create_task(ask_many(pool, 6))
        await asyncio.sleep(0.1)
        servers[1].misbehave("sync refuse")
        with refused("server_refuses_weights", servers[1].url):
            await pool.sync(checkpoint("b"), 1)
        answers = await asked
    failed = [answer for answer in answers if isinstance(answer, WeightSyncError)]
    assert len(failed) == 3  # the requests of the server that did not get the new weights
    assert {answer.text for answer in answers if answer not in failed} == {"b"}
    assert [server.paused for server in servers] == [False, False]


async def test_server_removed_during_a_sync_stays_paused_until_its_end(join, checkpoint):
    """Else it would compute with weights of which some are old, and keep that."""
    (server,), pool = join(1, in_flight_updates=True)
    newer = checkpoint("b")
    async with pool:
        loads = server.loading = asyncio.Event()
        server.calls.clear()
        sync = asyncio.create_task(pool.sync(newer, 1))
        while "/collective_rpc" not in server.calls:
            await asyncio.sleep(0.01)
        pool.replicas[0].mark_suspect()
        pool.replicas[0].failures = 3
        await asyncio.sleep(2.0)  # its monitor looks once a second
        assert "/resume" not in server.calls and not pool.replicas[0].ready
        server.loop.call_soon_threadsafe(loads.set)
        await sync
        while not pool.replicas[0].ready:
            await asyncio.sleep(0.05)
        assert (await pool.complete(MESSAGES, SAMPLING, 0)).text == "b"


async def test_server_paused_by_a_killed_run_answers_the_next_run(join):
    (server,), pool = join(1)
    server.paused = True
    async with pool:
        (answer,) = await ask_many(pool, 1)
    assert answer.text == "a"


async def test_caches_are_reset_between_requests(join):
    servers, pool = join(2)
    async with pool:
        before = asyncio.create_task(ask_many(pool, 6))
        await asyncio.sleep(0.05)
        for server in servers:
            server.calls.clear()
        await pool.reset_caches()
        assert before.done()
        assert len(await ask_many(pool, 6)) == 6
    for server in servers:
        assert set(server.calls[:3]) == {"/reset_prefix_cache", "/reset_mm_cache", "/reset_encoder_cache"}


@pytest.mark.parametrize(
    ("fault", "possible"),
    [
        ("sync refuse", ["server_refuses_weights"]),
        ("sync hang", ["sync_timeout"]),
        ("sync nothing", ["served_weights_old", "served_weights_differ"]),  # depends on which answers first
        ("sync cache busy", ["cache_not_reset"]),
    ],
)
async def test_failed_sync_stops_the_pool(fault, possible, join, checkpoint):
    servers, pool = join(2, sync_timeout=30 if "busy" in fault else 1)
    newer = checkpoint("b")
    async with pool:
        servers[1].misbehave(fault)
        with pytest.raises(WeightSyncError) as caught:
            await pool.sync(newer, 1)
        assert caught.value.code in possible
        with refused(caught.value.code):
            await pool.complete(MESSAGES, SAMPLING, 0)
        with refused(caught.value.code):
            await pool.sync(newer, 2)


@pytest.mark.parametrize("fault", ["sync html", "sync list", "sync empty", "sync null", "sync nested", "sync endless"])
async def test_garbage_from_weight_routes_fails_the_sync(fault, join, checkpoint):
    (server,), pool = join(1, sync_timeout=10)
    async with pool:
        server.misbehave(fault)
        with pytest.raises(WeightSyncError):
            await pool.sync(checkpoint("b"), 1)
        server.misbehave("")
        with pytest.raises(WeightSyncError):
            await pool.complete(MESSAGES, SAMPLING, 0)
        assert server.seen == 0


async def test_cancelled_sync_leaves_no_mislabeled_weights(join, checkpoint):
    servers, pool = join(2, sync_timeout=30)
    async with pool:
        servers[1].misbehave("sync hang")
        sync = asyncio.create_task(pool.sync(checkpoint("b"), 1))
        while servers[0].version != "b":
            await asyncio.sleep(0.01)
        sync.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sync
        with refused("sync_incomplete"):
            await pool.complete(MESSAGES, SAMPLING, 0)


@pytest.mark.parametrize("answer", ["<html>", "[]", '{"data": 3}', '{"data": [null]}', "[" * 50_000])
async def test_garbage_from_model_list_removes_the_server(answer, join):
    (server,), pool = join(1, ready_timeout=0.5)
    async with pool:
        server.misbehave("500")
        server.list_of_models = answer
        with pytest.raises((ServerError, GenerationFailure)):
            await asyncio.wait_for(pool.complete(MESSAGES, SAMPLING, 0), 20)
        with refused("no_server_left", server.url) as caught:
            await asyncio.wait_for(pool.complete(MESSAGES, SAMPLING, 1), 20)
        assert codes(caught.value.__cause__) == {"server_not_ready"}


async def test_later_weights_may_have_another_dtype(join, checkpoint):
    servers, pool = join(1)
    async with pool:
        await pool.sync(checkpoint("b", dtype="BF16"), 1)
    assert servers[0].version == "b"


async def test_rejects_checkpoint_of_another_model(stand_ins, make_pool, checkpoint):
    pool = make_pool(stand_ins(1), checkpoint("a"))
    with refused("served_shapes_differ", "w", (2, 5), (2, 4)):
        async with pool:
            await pool.sync(checkpoint("b", width=5), 1)


async def test_rejects_incomplete_checkpoint(stand_ins, make_pool, checkpoint):
    pool = make_pool(stand_ins(1), checkpoint("a"))
    file = checkpoint("b") / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(WeightSyncError) as caught:
        async with pool:
            await pool.sync(file.parent, 1)
    assert caught.value.where == str(file)


async def test_server_that_dies_during_a_sync_returns_with_new_weights(join, checkpoint):
    servers, pool = join(2)
    newer = checkpoint("b")
    async with pool:
        servers[1].misbehave("sync die", count=1)
        await pool.sync(newer, 1)
        assert not pool.replicas[1].ready
        while not pool.replicas[1].ready:
            await asyncio.sleep(0.05)
        assert servers[1].version == "b"
        assert {result.text for result in await ask_many(pool, 8)} == {"b"}


async def test_cancelled_requests_free_their_slots(join):
    (server,), pool = join(1, max_concurrent=1)
    server.delay = 0.2
    async with pool:
        for _ in range(3):
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(pool.complete(MESSAGES, SAMPLING, 1), 0.05)
        assert (await asyncio.wait_for(pool.complete(MESSAGES, SAMPLING, 2), 30)).text == "a"
        await asyncio.wait_for(pool.sync(pool.weights.folder, 1), 30)
        assert pool.replicas[0].outstanding == 0


async def test_rejects_server_without_training_routes(join):
    servers, pool = join(1, plain=True, ready_timeout=600.0)
    servers[0].list_of_models = json.dumps({"data": [{"id": "llama", "root": "/models/llama"}]})
    began = time.monotonic()
    with refused("server_not_for_training", "llama", "armature serve /models/llama", "VLLM_SERVER_DEV_MODE=1"):
        async with pool:
            await pool.reset_caches()
    assert time.monotonic() - began < 10


async def test_waiting_for_a_server_is_logged_early(join, caplog, monkeypatch):
    monkeypatch.setattr("armature.components.inference.monitor.SAY_AFTER", 0.0)
    (server,), pool = join(1, ready_timeout=1.2)
    server.list_of_models = "[]"
    with refused("server_not_ready", 1.2, server.url, "armature serve MODEL"):
        async with pool:
            await pool.notify()
    output = [record.getMessage() for record in caplog.records if "waiting for the server" in record.getMessage()]
    assert len(output) == 1 and server.url in output[0] and "armature serve MODEL" in output[0]
