"""Servers that come and go while a run goes on; against stand-in servers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from armature.components.contracts.machine import Machine
from armature.components.inference import members
from armature.components.inference.endpoints_file import read_endpoints
from armature.components.inference.pool import ServerPool
from armature.components.inference.settings import SamplingSettings
from tests.refusals import refused

MESSAGES = [{"role": "user", "content": "?"}]
MakePool = Callable[..., ServerPool]
StandIns = Callable[..., list[Any]]
Checkpoint = Callable[..., Path]


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(members, "READ_EVERY", 0.05)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "servers.txt"


def write(file: Path, *servers: Any) -> None:
    file.write_text("".join(f"{server.url}\n" for server in servers))


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.02)


class Asking:
    """Asks from several places, one request after another, until the block ends."""

    def __init__(self, pool: ServerPool, sampling: SamplingSettings) -> None:
        self._pool, self._sampling = pool, sampling
        self._asked, self.results, self._ends = 0, [], False

    async def __aenter__(self) -> Asking:
        self._tasks = [asyncio.create_task(self._ask()) for _ in range(6)]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._ends = True
        await asyncio.gather(*self._tasks)
        assert len(self.results) == self._asked

    async def _ask(self) -> None:
        while not self._ends:
            self._asked += 1
            self.results.append(await self._pool.complete(MESSAGES, self._sampling, 2 * self._asked))

    async def more(self, count: int = 12) -> set[str]:
        """The servers of the next `count` answers to questions that are asked from now on."""
        begin = len(self.results) + len(self._tasks)
        await until(lambda: len(self.results) >= begin + count)
        return {result.server for result in self.results[begin : begin + count]}


def test_a_server_is_added_and_one_removed_while_requests_go_on(
    stand_ins: StandIns, make_pool: MakePool, checkpoint: Checkpoint, sampling: SamplingSettings, file: Path
) -> None:
    first, second = stand_ins(2)
    first.delay = second.delay = 0.05
    write(file, first)
    pool = make_pool([], checkpoint("a"), endpoints_file=file)

    async def work() -> list[Any]:
        async with pool, Asking(pool, sampling) as asking:
            assert await asking.more() == {first.url}
            await pool.sync(checkpoint("b"), 1)
            write(file, first, second)
            await until(lambda: second.url in {result.server for result in asking.results})
            write(file, second)
            await until(lambda: pool.statistics.left == 1)
            assert await asking.more() == {second.url}
            asked, calls = first.seen, len(first.calls)
            await pool.sync(checkpoint("c"), 2)
            await asking.more()
            assert (first.seen, len(first.calls)) == (asked, calls)
            async with make_pool([first], checkpoint("d")) as other:  # its lease was given back
                assert (await other.complete(MESSAGES, sampling, 1)).text == "d"
        return asking.results

    results = asyncio.run(work())
    assert {(result.text, result.policy_version) for result in results} == {("a", 0), ("b", 1), ("c", 2)}
    assert {result.text for result in results if result.server == second.url} == {"b", "c"}
    counts = pool.statistics.counts()
    assert counts["completions"] == len(results) == first.answered.total() + second.answered.total() - 1
    assert (counts["joined"], counts["left"], counts["retries"], counts["ejections"]) == (1, 1, 0, 0)


def test_one_that_leaves_answers_what_it_was_asked(
    stand_ins: StandIns, make_pool: MakePool, checkpoint: Checkpoint, sampling: SamplingSettings, file: Path
) -> None:
    first, second = stand_ins(2)
    write(file, first)
    pool = make_pool([], checkpoint("a"), endpoints_file=file)

    async def work() -> None:
        async with pool:
            first.delay = 1.5
            asked = asyncio.create_task(pool.complete(MESSAGES, sampling, 1))
            await until(lambda: first.at_once == 1)
            write(file, second)
            await until(lambda: len(pool.replicas) == 2 and pool.replicas[1].ready and not pool.replicas[0].ready)
            assert not asked.done() and not pool.statistics.left
            assert (await pool.complete(MESSAGES, sampling, 3)).server == second.url
            assert (await asked).server == first.url
            await until(lambda: [replica.name for replica in pool.replicas] == [second.url])

    asyncio.run(work())
    assert pool.statistics.retries == 0


def test_one_that_left_comes_back_with_the_weights_of_then(
    stand_ins: StandIns, make_pool: MakePool, checkpoint: Checkpoint, sampling: SamplingSettings, file: Path
) -> None:
    first, second = stand_ins(2)
    write(file, first, second)
    pool = make_pool([], checkpoint("a"), endpoints_file=file)

    async def work() -> None:
        async with pool:
            write(file, second)
            await until(lambda: pool.statistics.left == 1)
            await pool.sync(checkpoint("b"), 1)
            assert (first.version, second.version) == ("a", "b")
            write(file, first, second)
            await until(lambda: len(pool.replicas) == 2 and pool.replicas[1].ready)
            assert first.version == "b" and pool.replicas[1].version == 1

    asyncio.run(work())


@pytest.mark.parametrize("content", ["", "# nothing\n", "half of a UR", None])
def test_a_list_that_cannot_be_used_changes_nothing_and_is_said_once(
    content: str | None,
    stand_ins: StandIns,
    make_pool: MakePool,
    checkpoint: Checkpoint,
    sampling: SamplingSettings,
    file: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    first, second = stand_ins(2)
    write(file, first)

    def said() -> list[str]:
        return [each.getMessage() for each in caplog.records if "keeps its servers" in each.getMessage()]

    async def work() -> None:
        async with make_pool([], checkpoint("a"), endpoints_file=file) as pool:
            file.unlink() if content is None else file.write_text(content)
            await until(lambda: bool(said()))
            await asyncio.sleep(0.3)
            assert len(said()) == 1 and str(file) in said()[0]
            assert (await pool.complete(MESSAGES, sampling, 1)).server == first.url
            write(file, second)
            await until(lambda: [replica.name for replica in pool.replicas] == [second.url])

    with caplog.at_level(logging.WARNING):
        asyncio.run(work())


def test_one_that_never_answers_disturbs_nobody_and_can_be_taken_out(
    stand_ins: StandIns, make_pool: MakePool, checkpoint: Checkpoint, sampling: SamplingSettings, file: Path
) -> None:
    (server,) = stand_ins(1)
    write(file, server)
    pool = make_pool([], checkpoint("a"), endpoints_file=file, ready_timeout=2.0)

    async def work() -> None:
        async with pool, Asking(pool, sampling) as asking:
            file.write_text(f"{server.url}\nhttp://127.0.0.1:1  # nobody\n")
            await until(lambda: len(pool.replicas) == 2 and pool.replicas[1].given_up is not None)
            await pool.sync(checkpoint("b"), 1)
            assert await asking.more() == {server.url}
            write(file, server)
            await until(lambda: len(pool.replicas) == 1)

    asyncio.run(work())
    assert server.version == "b" and pool.statistics.failures == {}


def test_when_all_are_gone_the_run_hears_it(
    stand_ins: StandIns, make_pool: MakePool, checkpoint: Checkpoint, sampling: SamplingSettings, file: Path
) -> None:
    (server,) = stand_ins(1)
    write(file, server)

    async def work() -> None:
        async with make_pool([], checkpoint("a"), endpoints_file=file, ready_timeout=2.0) as pool:
            file.write_text("http://127.0.0.1:1\n")
            await until(lambda: pool.statistics.left == 1)
            with refused("no_server_left", "127.0.0.1:1"):
                await pool.complete(MESSAGES, sampling, 1)

    asyncio.run(work())


def test_a_run_that_waits_takes_the_server_that_another_no_longer_lists(
    stand_ins: StandIns, make_pool: MakePool, checkpoint: Checkpoint, sampling: SamplingSettings, tmp_path: Path
) -> None:
    one, two = stand_ins(2)
    mine, yours = tmp_path / "mine", tmp_path / "yours"
    write(mine, one, two)
    write(yours, two)
    first = make_pool([], checkpoint("a"), endpoints_file=mine)
    second = make_pool([], checkpoint("b"), endpoints_file=yours, lease_timeout=60.0)

    async def wait() -> tuple[str, str]:
        async with second:
            answer = await second.complete(MESSAGES, sampling, 1)
            return answer.text, answer.server

    async def work() -> None:
        async with first, Asking(first, sampling) as asking:
            waiting = asyncio.create_task(wait())
            await asking.more()
            assert not waiting.done()
            write(mine, one)
            assert await waiting == ("b", two.url)
            assert await asking.more() == {one.url}
        assert {result.text for result in asking.results} == {"a"}

    asyncio.run(work())


def test_what_the_file_may_hold(file: Path) -> None:
    file.write_text("# ours\nhttp://10.0.0.7:8000/  # the first\n\nhttps://servers/a\nhttp://10.0.0.7:8000\n")
    assert read_endpoints(file) == ["http://10.0.0.7:8000", "https://servers/a"]
    for line in ("10.0.0.7:8000", "ftp://servers", "http://", "http://a?b", "http://user:secret@host", "http://a b"):
        file.write_text(f"http://10.0.0.7:8000\n{line}\n")
        with refused("invalid_server_url", file) as caught:
            read_endpoints(file)
        assert "secret" not in caught.value.what
    file.write_bytes(b"\xff\xfe")
    with refused("servers_file_unreadable", file):
        read_endpoints(file)


def test_what_it_cannot_be_set_with() -> None:
    with refused("value_error", "endpoints_file"):
        Machine(endpoints_file=Path("servers.txt"), endpoints=("http://a:1",))


def test_a_missing_file_is_said_before_the_pool_starts(make_pool: MakePool, checkpoint: Checkpoint, file: Path) -> None:
    with refused("servers_file_unreadable", file):
        make_pool([], checkpoint("a"), endpoints_file=file)
