"""Workers on nodes of a real Ray cluster: nodes that die, lack room, have other packages, or are not there."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from typing import Any

import psutil
import pytest

from armature.components.configuration.stages import run_stage
from armature.components.contracts.cluster import ClusterSettings
from armature.components.contracts.machine import Machine
from armature.components.environments.alfworld.text.host import EngineHost
from armature.components.machine.workers import actor
from armature.components.machine.workers.actor import WorkerActor
from armature.components.machine.workers.channel import WorkerError
from armature.components.machine.workers.worker import workers_on
from armature.components.robots.datasets.settings import DatasetSettings, QuantileStatsSettings
from armature.components.robots.datasets.source import pinned
from tests.builders import make_machine
from tests.environments.alfworld.text.test_engine import games, turns_of
from tests.machine.workers.calls import call
from tests.machine.workers.test_worker import gone
from tests.refusals import refused
from tests.robots.datasets.conftest import write
from tests.robots.libero.demonstrations.test_stage import files, settings

MODULE = "tests.machine.workers.misbehaving"


def playing_on(nodes: list[Any]) -> list[int]:
    """Return the process ids of LIBERO's simulators on these Ray nodes."""
    raylets = [psutil.Process(node.all_processes["raylet"][0].process.pid) for node in nodes]
    return [
        each.pid
        for raylet in raylets
        for each in raylet.children(recursive=True)
        if each.status() != psutil.STATUS_ZOMBIE and "armature.components.robots.libero.worker" in each.cmdline()
    ]


def node_of(ray_cluster: Any, pid: int) -> Any:
    """Return the Ray node on which the process `pid` runs: its raylet is one of the process's ancestors."""
    parents = {each.pid for each in psutil.Process(pid).parents()}
    raylets = {node.all_processes["raylet"][0].process.pid: node for node in ray_cluster.worker_nodes}
    return raylets[(parents & set(raylets)).pop()]


def test_call_after_a_lost_node_uses_another_node(ray_cluster):
    nodes = [ray_cluster.add_node(num_cpus=1, resources={"fragile": 1}) for _ in range(2)]
    place = ClusterSettings(address=ray_cluster.address, resources={"fragile": 1}, start_timeout=60)
    with WorkerActor(place, MODULE, timeout=60.0) as one, WorkerActor(place, MODULE, timeout=60.0) as other:
        assert call(one, "add", 1) == call(other, "add", 1) == 1
        assert one.pid is not None
        victim = node_of(ray_cluster, one.pid)
        other.close()
        threading.Timer(1.0, ray_cluster.remove_node, (victim,), {"allow_graceful": False}).start()
        with refused("worker_node_lost", "sleep", kind=WorkerError):
            call(one, "sleep", 600.0)
        assert not one.alive
        assert call(one, "add", 1) == 1 and one.starts == 2
        assert one.pid is not None and node_of(ray_cluster, one.pid) is not victim
    ray_cluster.remove_node(next(node for node in nodes if node is not victim))


def test_demonstrations_are_identical_after_a_lost_node(ray_cluster, tmp_path):
    nodes = [ray_cluster.add_node(num_cpus=2, resources={"drawing": 2}) for _ in range(2)]
    place = ClusterSettings(address=ray_cluster.address, resources={"drawing": 1}, start_timeout=60)
    chosen = settings()
    here = run_stage("demonstrations", chosen, {}, make_machine(store=tmp_path / "here", environment_timeout=300))
    machine = make_machine(store=tmp_path / "there", environment_timeout=300, workers__environments=2, cluster=place)
    lost = []

    def lose_one() -> None:
        while not (playing := playing_on(nodes)):
            time.sleep(0.5)
        lost.append(node_of(ray_cluster, playing[0]))
        time.sleep(8.0)
        ray_cluster.remove_node(lost[0], allow_graceful=False)

    thread = threading.Thread(target=lose_one)
    thread.start()
    there = run_stage("demonstrations", chosen, {}, machine)
    thread.join()
    assert lost[0] in nodes and files(there.path) == files(here.path)


def test_cluster_statistics_are_identical(cluster, tmp_path, monkeypatch):
    monkeypatch.setenv("ARMATURE_CACHE", str(tmp_path / "cache"))
    write(tmp_path / "dataset", data_files_size_in_mb=1e-3)
    chosen = QuantileStatsSettings(features=("action", "observation.images.front"))

    def measured(machine: Machine) -> str:
        source = run_stage("dataset", pinned(DatasetSettings(path=str(tmp_path / "dataset"))), {}, machine)
        return run_stage("quantile-stats", chosen, {"dataset": source}, machine).digest

    here = measured(make_machine(store=tmp_path / "here"))
    assert measured(make_machine(store=tmp_path / "there", workers__statistics=2, cluster=cluster)) == here


def test_text_games_on_cluster_give_identical_observations(cluster):
    few = games(3, seed=5)
    here = EngineHost(1)
    with workers_on(cluster):
        there = EngineHost(2)
    try:
        for game in few:
            assert turns_of(there, game, game.plan) == turns_of(here, game, game.plan)
    finally:
        here.close()
        there.close()


def test_missing_room_is_an_error_with_free_resources(ray_cluster):
    place = ClusterSettings(address=ray_cluster.address, num_cpus=1000, start_timeout=3)
    with refused("no_room_in_cluster", "'num_cpus': 1000"):
        call(WorkerActor(place, MODULE, timeout=5.0), "echo", 1)


def test_worker_waiting_for_room_closes_at_once(ray_cluster):
    place = ClusterSettings(address=ray_cluster.address, num_cpus=1000, start_timeout=60)
    worker = WorkerActor(place, MODULE, timeout=5.0)
    threading.Timer(1.0, worker.close).start()
    began = time.monotonic()
    with pytest.raises(WorkerError):
        call(worker, "echo", 1)
    assert time.monotonic() - began < 20


def test_room_equals_what_ray_can_place(ray_cluster):
    node = ray_cluster.add_node(num_cpus=1, resources={"fifths": 1})
    places = [
        WorkerActor(
            ClusterSettings(address=ray_cluster.address, num_cpus=0, resources={"fifths": 0.2}, start_timeout=60),
            MODULE,
            timeout=60.0,
        )
        for _ in range(5)
    ]
    assert max(actor.room(ray_cluster.address, {"fifths": 0.2}).values()) == len(places)
    for each in places:
        assert call(each, "echo", 1) == 1
    for each in places:
        each.close()
    ray_cluster.remove_node(node)


def test_node_without_packages_is_an_error(cluster):
    worker = WorkerActor(cluster, MODULE, timeout=5.0)
    worker._arguments = (MODULE, b"cut off", 5.0, b"", 2**20)
    with refused("cluster_start_failed", "EOFError"):
        call(worker, "echo", 1)
    assert not worker.alive


def test_rejects_node_with_other_packages_or_code():
    here = actor.installed()
    about = {"node": "10.0.0.2", "code": here["code"], "packages": dict(here["packages"])}
    actor.refuse_other(about, "machine.cluster")
    actor.refuse_other(about | {"packages": about["packages"] | {"more": "1"}}, "machine.cluster")
    with refused("node_differs", "numpy 1.0", "10.0.0.2"):
        actor.refuse_other(about | {"packages": about["packages"] | {"numpy": "1.0"}}, "machine.cluster")
    with refused("node_differs"):
        actor.refuse_other(about | {"code": "0"}, "machine.cluster")


def test_missing_cluster_is_an_error():
    code = (
        "from armature.components.contracts.cluster import ClusterSettings\n"
        "from armature.components.machine.workers.actor import WorkerActor\n"
        "from armature.components.machine.workers.requests import ANYTHING\n"
        "worker = WorkerActor(ClusterSettings(address='127.0.0.1:1'), 'x', timeout=5.0)\n"
        "worker.call('echo', reply=ANYTHING)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120)
    assert "ConfigurationError: the Ray cluster cannot be joined" in done.stderr


def test_workers_end_with_a_killed_run(cluster):
    code = (
        "import os, signal\n"
        "from armature.components.contracts.cluster import ClusterSettings\n"
        "from armature.components.machine.workers.actor import WorkerActor\n"
        "from armature.components.machine.workers.requests import ANYTHING\n"
        f"place = ClusterSettings.model_validate_json({cluster.model_dump_json()!r})\n"
        f"worker = WorkerActor(place, {MODULE!r}, timeout=60.0)\n"
        "worker.call('echo', 1, reply=ANYTHING)\n"
        "print(worker.pid, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    out = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=False).stdout
    assert gone(int(out), 30)
