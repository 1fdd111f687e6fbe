"""Rollouts by worker processes: what they play is what one process plays, whatever they and their servers suffer."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import pyarrow.parquet as pq
import pytest

from armature.components.artifacts.images import ImageStore
from armature.components.artifacts.store import ArtifactStore
from armature.components.contracts.episodes import Task
from armature.components.contracts.rollouts import GenerateOutputs
from armature.components.environments.make import make_environment
from armature.components.environments.settings import EnvironmentSettings
from armature.components.inference.pool import ServerPool
from armature.components.inference.settings import SamplingSettings
from armature.components.machine.workers.requests import NOTHING
from armature.components.machine.workers.worker import workers_on
from armature.components.rollouts.collect import collect
from armature.components.rollouts.settings import RolloutSettings
from armature.components.rollouts.shards import SHARD_REPLY, WORKER, RolloutWorkers, ShardQueue
from armature.components.rollouts.table import write_rollouts
from armature.components.rollouts.worker import SHARDS
from tests.builders import make_machine
from tests.inference.conftest import checkpoint, make_pool, stand_ins
from tests.machine.workers.conftest import cluster, ray_cluster
from tests.refusals import refused

from .conftest import RecordedEvents

__all__ = ["checkpoint", "cluster", "make_pool", "ray_cluster", "stand_ins"]
COLORS = EnvironmentSettings(name="colors", train_tasks=6, heldout_tasks=1)
PLAN = RolloutSettings(groups_per_step=6, group_size=2, sampling=SamplingSettings(max_tokens=3), seed=7)
TASKS: tuple[Task, ...] = tuple(make_environment(COLORS).tasks("train"))


@pytest.fixture
def weights(checkpoint) -> Path:
    return checkpoint("start")


def rows(folder: Path, outputs: GenerateOutputs) -> list[dict[str, Any]]:
    """Write `outputs` as tables to `folder`, and return the rows of the rollouts without the columns of measured
    times."""
    folder.mkdir()
    write_rollouts(folder, outputs)
    table = pq.read_table(folder / "rollouts.parquet")
    return table.drop_columns(["generate_seconds", "environment_seconds"]).to_pylist()


class Run:
    """A run with two rollout workers, a pool of stand-in servers, and a store."""

    def __init__(self, folder: Path, pool: ServerPool, **machine: Any) -> None:
        self.pool, self.events = pool, RecordedEvents()
        self.store = ArtifactStore(folder / "store", machine.get("remote_store"))
        self.machine = make_machine(pool.machine, **{"workers__rollouts": 2, "workers__environments": 1} | machine)
        self.workers = RolloutWorkers(PLAN, COLORS, pool, self.store, self.machine, "f" * 20)

    async def collect(self, step: int = 3) -> GenerateOutputs:
        return await self.workers.collect(TASKS, self.events, step=step, first_group=4, name="rollouts")

    def play(self, work: Callable[[], Any] | None = None) -> Any:
        async def played() -> Any:
            async with self.pool:
                return await (work or self.collect)()

        try:
            return asyncio.run(played())
        finally:
            self.workers.close()

    @property
    def shards(self) -> list[str]:
        return sorted(folder.name for folder in (self.store.root / SHARDS).glob("*") if folder.is_dir())


@pytest.fixture
def start(stand_ins, make_pool, weights, tmp_path) -> Callable[..., tuple[list[Any], Run]]:
    """Return a function that starts `count` stand-in servers and makes a `Run` with them. It returns both."""

    def make(count: int, plain: bool = False, **machine: Any) -> tuple[list[Any], Run]:
        servers = stand_ins(count, plain)
        return servers, Run(tmp_path, make_pool(servers, weights), **machine)

    return make


def in_one_process(folder: Path, pool: ServerPool) -> GenerateOutputs:
    async def played() -> GenerateOutputs:
        async with pool:
            return await collect(
                make_environment(COLORS),
                TASKS,
                PLAN.group_size,
                pool,
                ImageStore(folder / "images"),
                PLAN.sampling,
                step=3,
                seed=PLAN.seed,
                machine=pool.machine,
                events=RecordedEvents(),
                first_group=4,
            )

    return asyncio.run(played())


def test_rollout_workers_write_the_tables_of_one_process(stand_ins, make_pool, weights, tmp_path):
    servers = stand_ins(2)
    alone = in_one_process(tmp_path, make_pool(servers, weights))
    asked = [sorted(server.answered.elements()) for server in servers]
    for server in servers:
        server.answered.clear()
    run = Run(tmp_path, make_pool(servers, weights))
    outputs = run.play()
    assert rows(tmp_path / "workers", outputs) == rows(tmp_path / "alone", alone)
    assert sorted(seed for each in asked for seed in each) == sorted(
        seed for server in servers for seed in server.answered.elements()
    )
    assert run.pool.statistics.requests == 0, "this process asked nothing"
    for trajectory in outputs.trajectories:
        for image in trajectory.turns[0].images:
            assert ImageStore(run.store.images).read(image) == ImageStore(tmp_path / "images").read(image)
    assert [done for _, done, _, _ in run.events.bars] == list(range(1, 13))
    assert run.shards == [f"{'f' * 20}-00003-{first:04d}-0003" for first in (4, 7)]
    run.workers.forget(3)
    assert run.shards == []


def test_finished_shards_are_reused(stand_ins, make_pool, weights, tmp_path):
    servers = stand_ins(1)
    first = Run(tmp_path, make_pool(servers, weights))
    before = first.play()
    servers[0].answered.clear()
    again = Run(tmp_path, make_pool(servers, weights))
    assert rows(tmp_path / "again", again.play()) == rows(tmp_path / "before", before)
    assert not servers[0].answered


def test_killed_worker_loses_no_rollout(start):
    servers, run = start(1)
    servers[0].delay = 2.0
    killed: list[int] = []

    def kill_one() -> None:
        while not (playing := [each.pid for each in run.workers._workers.workers if each.pid and servers[0].at_once]):
            time.sleep(0.01)
        killed.extend(playing[:1])
        os.kill(killed[0], signal.SIGKILL)

    thread = threading.Thread(target=kill_one)
    thread.start()
    outputs = run.play()
    thread.join()
    assert [each.trajectory_id for each in outputs.trajectories] == [
        f"000003-{group:04d}-{member:02d}" for group in range(4, 10) for member in range(2)
    ]
    (output,) = (message for message in run.events.messages if "collected again" in message)
    assert f"process {killed[0]}" in output and "the shard of step 3, groups " in output


def playing_processes() -> set[int]:
    """Return the process ids of the rollout workers that this process, or a node of its cluster, has started."""
    result = set()
    for each in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            command = each.cmdline()
            if WORKER in command and not any(part.endswith("components/machine/process.py") for part in command):
                result.add(each.pid)
    return result


@pytest.fixture(params=["process", *(["actor"] if find_spec("ray") else [])])
def place(request) -> Iterator[None]:
    """Run the workers as processes of this machine, or as actors on a cluster."""
    with workers_on(None if request.param == "process" else request.getfixturevalue("cluster")):
        yield


@pytest.mark.usefixtures("place")
def test_late_worker_is_replaced_without_duplicates(stand_ins, make_pool, weights, tmp_path):
    servers = stand_ins(1)
    alone = in_one_process(tmp_path, make_pool(servers, weights))
    run = Run(tmp_path, make_pool(servers, weights), rollout_straggler_timeout=2.0)
    servers[0].delay = 1.0
    before = playing_processes()

    async def stopping() -> GenerateOutputs:
        playing = asyncio.create_task(run.collect())
        while not (started := playing_processes() - before) or not servers[0].at_once:
            await asyncio.sleep(0.05)
        os.kill(started.pop(), signal.SIGSTOP)  # it says no more that it lives, but would have two minutes to
        await asyncio.sleep(5.0)
        assert not run.events.messages, "nobody waits for the rollouts yet"
        run.workers.training_waits(3)
        return await playing

    outputs = run.play(stopping)
    assert rows(tmp_path / "workers", outputs) == rows(tmp_path / "alone", alone)
    late, again = run.events.messages
    assert "is late: training has waited 2 s" in late and "is collected again" in again
    assert late.startswith(again.partition(" is collected")[0])
    assert run.pool.statistics.stragglers == 1
    assert len(run.shards) == 2


async def test_shard_is_late_after_the_straggler_timeout():
    queue = ShardQueue[str, str](["a", "b", "c"])
    assert [await queue.take() for _ in range(3)] == [("a", 1), ("b", 1), ("c", 1)]
    with queue.played("a", "one", 0.0), queue.played("b", "two", 5.0), queue.played("c", "three", 5.0):
        assert not list(queue.overdue(99.0, 0.0, 10.0)), "no worker is free"
        idle = asyncio.create_task(queue.take())
        await asyncio.sleep(0)
        assert not list(queue.overdue(13.0, 4.0, 10.0)), "waited for since 4"
        assert list(queue.overdue(16.0, 4.0, 10.0)) == [("a", "one")], "one worker is free, and a is the longest"
        assert list(queue.overdue(16.0, 4.0, 10.0)) == [("b", "two")], "each is taken once"
        await queue.put_back("a", 2)
        assert await idle == ("a", 2)
        assert not list(queue.overdue(99.0, 4.0, 10.0)), "no worker is free any more"
    for _ in range(3):
        await queue.made()
    assert await queue.take() is None


def test_single_worker_is_never_late():
    with refused("value_error", "limits.rollout_straggler_timeout", "workers.rollouts"):
        make_machine(workers__rollouts=1, rollout_straggler_timeout=60.0)


def test_requests_move_from_a_dead_server_to_another(start):
    servers, run = start(2)
    servers[0].misbehave("die")

    async def dying() -> GenerateOutputs:
        playing = asyncio.create_task(run.collect())
        while not servers[0].seen:
            await asyncio.sleep(0.01)
        servers[0].healthy = False
        outputs = await playing
        while not run.pool.statistics.ejections:
            await asyncio.sleep(0.01)
        return outputs

    outputs = run.play(dying)
    assert len(outputs.trajectories) == 12 and not outputs.failures
    assert servers[1].answered.total() == 12 / PLAN.group_size


def test_shard_waits_for_a_returning_server(start):
    servers, run = start(1)
    servers[0].misbehave("die", 10)
    outputs = run.play()
    assert len(outputs.trajectories) == 12 and not outputs.failures
    assert any("is collected again" in message and servers[0].url in message for message in run.events.messages)


def test_answers_of_other_weights_are_discarded(start):
    _, run = start(1)
    real = run.pool.direct_access

    async def changed() -> GenerateOutputs:
        async with real(1) as lent:
            stale = [replace(each, weights_id="another") for each in lent]
        worker = run.workers._workers.workers[0]
        tasks = [{"task_id": "a", "split": "train", "payload": TASKS[0].payload}]
        arguments = "e" * 20, 1, 0, tasks, [vars(each) for each in stale]
        forms: dict[str, Any] = {"part": NOTHING, "most_parts": 100, "reply": SHARD_REPLY}
        _, reply = await asyncio.to_thread(worker.stream, "play", *arguments, **forms)
        assert reply.model_dump() == {
            "made": False,
            "suspects": [{"name": stale[0].name, "weights_id": "another", "reason": "other_weights"}],
        }
        return await run.collect()

    assert len(run.play(changed).trajectories) == 12
    assert run.shards == [f"{'f' * 20}-00003-{first:04d}-0003" for first in (4, 7)]


def test_sync_waits_for_running_shards(start, checkpoint):
    servers, run = start(2)
    for server in servers:
        server.delay = 0.5

    async def overlapped() -> tuple[GenerateOutputs, GenerateOutputs]:
        first = asyncio.create_task(run.collect(1))
        while not any(server.at_once for server in servers):
            await asyncio.sleep(0.02)
        await run.pool.sync(checkpoint("newer"), 1)
        return await first, await run.collect(2)

    first, second = run.play(overlapped)
    versions = [{turn.policy_version for each in part.trajectories for turn in each.turns} for part in (first, second)]
    assert versions == [{0}, {1}]


def test_rejects_server_without_weights_id(start):
    _, run = start(1, plain=True)
    with refused("weights_mark_missing", "machine.workers.rollouts"):
        run.play()


def test_store_that_workers_cannot_see_is_an_error(start, tmp_path):
    _, run = start(1)
    run.store = run.workers._store = ArtifactStore(tmp_path / "elsewhere")
    with refused("store_not_shared", "machine.store", tmp_path / "elsewhere"):
        run.play()
