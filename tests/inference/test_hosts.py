"""A server's machine, this one or a node of a Ray cluster: the same contract; stand-in programs in vLLM's place."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from armature.components.contracts.cluster import ClusterSettings, ServerBundle
from armature.components.contracts.errors import ServerError
from armature.components.contracts.machine import Machine
from armature.components.inference.command import is_deterministic, server_command, server_environment
from armature.components.inference.host import Host, LocalHost, PlacedHost, ServerNeeds
from armature.components.inference.pool import ServerPool
from armature.components.inference.settings import SamplingSettings, ServerSettings
from armature.components.machine.workers.placed import NodeActor, PlacedProgram, PlacementBundles
from tests.builders import make_machine
from tests.machine.workers.conftest import cluster, ray_cluster
from tests.refusals import refused

from .test_device_groups import until
from .test_pool_restarts import MESSAGES, STAND_IN

__all__ = ["cluster", "ray_cluster"]
SETTINGS = ServerSettings(max_model_len=512, max_images_per_prompt=2, dtype="float32")
BUNDLE = ServerBundle(num_cpus=1, resources={"steady": 1})
needs_ray = pytest.mark.skipif(find_spec("ray") is None, reason="needs Ray: make interop-ray")
Checkpoint = Callable[..., Path]


@pytest.fixture(params=["local", pytest.param("node", marks=needs_ray)])
def host(request: pytest.FixtureRequest) -> Iterator[Host]:
    if request.param == "local":
        host: Host = LocalHost()
        yield host
        host.stop()
        return
    place = request.getfixturevalue("cluster")
    places = PlacementBundles(place, BUNDLE, 1)
    host = PlacedHost(places, 0)
    yield host
    host.stop()
    places.close()


def needs(checkpoint: Path, **changes: Any) -> ServerNeeds:
    arguments = {"name": "vllm-0", "python": sys.executable, "model": str(checkpoint), "cache_gib": 0.1, "port": None}
    return ServerNeeds(**(arguments | changes))


def until_gone(pid: int) -> None:
    end = time.monotonic() + 20
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < end
        time.sleep(0.05)


@needs_ray
def test_interrupted_start_leaves_no_actor(request: pytest.FixtureRequest, checkpoint: Checkpoint) -> None:
    places = PlacementBundles(request.getfixturevalue("cluster"), BUNDLE, 1)
    for seconds in (None, 0.05, 0.4, 0.8, 1.2):
        placed = PlacedProgram(places, 0, NodeActor, ServerError)

        def place(placed: PlacedProgram, early: bool) -> None:
            with suppress(ServerError), placed.starting() as stopped:
                if early:  # while it joined the cluster
                    placed.stop()
                placed.place(stopped)

        starting = threading.Thread(target=place, args=(placed, seconds is None))
        starting.start()
        if seconds is not None:
            time.sleep(seconds)
            placed.stop()
        starting.join(60)
        assert not starting.is_alive() and placed._actor is None
    places.close()


def test_program_listens_at_its_address_and_ends_with_its_children(
    host: Host, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    address, port = host.prepare(needs(checkpoint("a")))
    assert not host.alive
    code = (
        "import http.server, os, subprocess, sys\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        f"open({str(tmp_path / 'pids')!r}, 'w').write(f'{{os.getpid()}} {{child.pid}}')\n"
        "print('the word is', os.environ['WORD'], flush=True)\n"
        f"http.server.test(http.server.SimpleHTTPRequestHandler, port={port}, bind={address!r})\n"
    )
    host.start([sys.executable, "-c", code], tmp_path / "logs/one.log", {"WORD": "abracadabra"})
    end = time.monotonic() + 30
    while "the word is" not in host.tail(30):
        assert host.alive and time.monotonic() < end
        time.sleep(0.05)
    with httpx.Client(trust_env=False, transport=httpx.HTTPTransport(retries=20)) as http:
        assert http.get(f"http://{address}:{port}/").status_code == 200
    assert host.tail(1).endswith("-") or "abracadabra" in host.tail(30)
    pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    host.stop()
    assert not host.alive
    for pid in pids:
        until_gone(pid)


def test_program_reports_its_end_and_can_restart(host: Host, checkpoint: Checkpoint, tmp_path: Path) -> None:
    model = checkpoint("a")
    for number in (3, 5):
        host.prepare(needs(model))
        host.start([sys.executable, "-c", f"print('to {number}'); raise SystemExit({number})"], tmp_path / "log", {})
        end = time.monotonic() + 30
        while host.alive:
            assert time.monotonic() < end
            time.sleep(0.05)
        assert host.ending == f"with exit code {number}" and host.tail(1) == f"to {number}"
        host.stop()


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"python": "/nowhere/python"}, "vllm_missing"),
        ({"model": "/nowhere"}, "served_model_missing"),
        ({"cache_gib": 1e6}, "server_memory_missing"),
    ],
)
def test_missing_requirements_of_the_node_are_an_error(
    host: Host, checkpoint: Checkpoint, changes: dict[str, Any], code: str
) -> None:
    with refused(code, *(f"{value:g}" if isinstance(value, float) else value for value in changes.values())):
        host.prepare(needs(checkpoint("a"), **changes))
    assert not host.alive


# On a cluster


@pytest.fixture
def python(tmp_path: Path) -> Path:
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nshift 2\nexec {sys.executable} {STAND_IN} "$@"\n')
    python.chmod(0o755)
    return python


@pytest.fixture
def placed_pool(python: Path, tmp_path: Path) -> Callable[..., ServerPool]:
    def make(weights: Path, cluster: ClusterSettings, bundle: ServerBundle = BUNDLE, **machine: Any) -> ServerPool:
        place = cluster.model_copy(update={"servers": bundle})
        facts = {"servers__count": 2, "ready_timeout": 60, **machine}
        return ServerPool(
            weights, SETTINGS, make_machine(servers__python=python, cluster=place, **facts), tmp_path / "logs"
        )

    return make


class Load:
    """Constant load on a pool while an `async with` block runs: `at_once` tasks, each of which sends one request after
    the other."""

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


async def ask_many(pool: ServerPool, sampling: SamplingSettings, count: int) -> list[Any]:
    return await asyncio.gather(*(pool.complete(MESSAGES, sampling, 2 * seed) for seed in range(count)))


def serves(node: Any) -> bool:
    """Return True if a server runs on this Ray node."""
    raylet = psutil.Process(node.all_processes["raylet"][0].process.pid)
    return any(str(STAND_IN) in each.cmdline() for each in raylet.children(recursive=True) if each.is_running())


@needs_ray
def test_server_of_a_lost_node_restarts_elsewhere(
    ray_cluster: Any,
    cluster: ClusterSettings,
    placed_pool: Callable[..., ServerPool],
    checkpoint: Checkpoint,
    sampling: SamplingSettings,
) -> None:
    nodes = [ray_cluster.add_node(num_cpus=1, resources={"serving": 1}) for _ in range(3)]
    pool = placed_pool(checkpoint("a"), cluster, ServerBundle(num_cpus=1, resources={"serving": 1}))

    async def work() -> list[Any]:
        async with pool:
            before = await ask_many(pool, sampling, 8)
            await pool.sync(checkpoint("b"), 1)
            async with Load(pool, sampling, 6) as load:
                lost = nodes.pop([serves(node) for node in nodes].index(True))
                await asyncio.to_thread(ray_cluster.remove_node, lost, allow_graceful=False)
                await until(lambda: pool.statistics.ejections == 1)
                async with asyncio.timeout(90):
                    while not all(replica.ready for replica in pool.replicas):
                        await asyncio.sleep(0.05)
                await load.until_answered_by("vllm-0")
                await load.until_answered_by("vllm-1")
            assert {result.server for result in before} == {"vllm-0", "vllm-1"}
            return load.results

    results = asyncio.run(work())
    assert {(result.text, result.policy_version) for result in results} == {("b", 1)}
    assert not pool.statistics.failures and pool.statistics.restarts == 1
    for node in nodes:
        ray_cluster.remove_node(node)


@needs_ray
def test_each_server_has_its_own_gpus(ray_cluster: Any, cluster: ClusterSettings, tmp_path: Path) -> None:
    """Ray counts GPUs that it is told of."""
    node = ray_cluster.add_node(num_cpus=2, num_gpus=4, resources={"serving cards": 2})
    bundle = ServerBundle(num_cpus=1, tensor_parallel_size=2, resources={"serving cards": 1})
    places = PlacementBundles(cluster, bundle, 2)
    (tmp_path / "config.json").touch()
    hosts, devices = [PlacedHost(places, index) for index in range(2)], list[str]()
    for index, host in enumerate(hosts):
        host.prepare(needs(tmp_path, cache_gib=None))
        command = [sys.executable, "-c", "import os; print(os.environ['CUDA_VISIBLE_DEVICES'])"]
        host.start(command, tmp_path / f"{index}.log", {"CUDA_VISIBLE_DEVICES": "0,1"})
        while host.alive:
            time.sleep(0.05)
        devices += host.tail(1).split(",")
    assert sorted(devices) == ["0", "1", "2", "3"]
    for host in hosts:
        host.stop()
    places.close()
    ray_cluster.remove_node(node)


@needs_ray
def test_missing_room_is_an_error_with_free_resources(
    cluster: ClusterSettings, placed_pool: Callable[..., ServerPool], checkpoint: Checkpoint
) -> None:
    place = cluster.model_copy(update={"start_timeout": 2.0})
    pool = placed_pool(checkpoint("a"), place, ServerBundle(num_cpus=1000))

    async def work() -> None:
        async with pool:
            raise AssertionError

    with refused("no_room_in_cluster", "machine.cluster.servers", "'CPU': 1000"):
        asyncio.run(work())


def test_cluster_server_gets_the_right_command(checkpoint: Checkpoint) -> None:
    place = ClusterSettings(address="auto", servers=ServerBundle(num_cpus=3, tensor_parallel_size=2))
    machine = make_machine(cluster=place)
    gpus = machine.gpus_of_server(1)
    command = server_command(checkpoint("a"), SETTINGS, machine, port=1, gpus=gpus, address="10.0.0.7")
    assert command[command.index("--host") + 1] == "10.0.0.7"
    assert command[command.index("--tensor-parallel-size") + 1] == "2"
    assert not is_deterministic(SETTINGS, machine)
    on_cpu = make_machine(cluster=ClusterSettings(address="auto", servers=ServerBundle(num_cpus=3)))
    assert on_cpu.gpus_of_server(0) == () and is_deterministic(SETTINGS, on_cpu)
    assert server_environment(on_cpu, api_key="", gpus=())["OMP_NUM_THREADS"] == "3"
    assert place.servers is not None and place.servers.resources_of_node() == {"CPU": 3, "GPU": 2}


@pytest.mark.parametrize(
    ("key", "value"), [("endpoints", ["http://10.0.0.7:8000"]), ("gpus", [[0]]), ("weight_transfer", "nccl")]
)
def test_rejects_settings_that_conflict_with_adapters(key: str, value: Any) -> None:
    place = {"address": "auto", "servers": {}}
    make_machine(cluster=place, workers__rollouts=2)
    with refused("value_error", f"servers.{key}"):
        Machine.model_validate({"cluster": place, "servers": {key: value}})
