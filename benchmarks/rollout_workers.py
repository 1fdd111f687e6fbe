"""1,024 episodes of ALFWorld at once: collected by actors on four nodes of a Ray cluster, and by one process.

Usage, in an environment that has Ray: python -m benchmarks.rollout_workers [EPISODES].
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil

from armature.components.artifacts.images import ImageStore
from armature.components.artifacts.store import ArtifactStore
from armature.components.configuration.stages import TerminalEvents
from armature.components.contracts.cluster import ClusterSettings
from armature.components.contracts.machine import Machine, MachineLimits, MachineServers, MachineWorkers
from armature.components.contracts.rollouts import GenerateOutputs
from armature.components.environments.make import make_environment
from armature.components.environments.settings import EnvironmentSettings
from armature.components.inference.pool import ServerPool
from armature.components.inference.settings import SamplingSettings, ServerSettings
from armature.components.machine.process import Program
from armature.components.machine.workers.worker import workers_on
from armature.components.robots.libero.processes import SimulatorProcess
from armature.components.robots.libero.tasks import suite_tasks
from armature.components.rollouts.collect import collect
from armature.components.rollouts.settings import RolloutSettings
from armature.components.rollouts.shards import RolloutWorkers
from benchmarks.libero import settings as simulator_settings
from benchmarks.table import Row

ROOT = Path(__file__).parents[1]
RAY = ROOT / ".venv-ray/bin/python"
HOSTS, GROUP, TURNS, SLOTS = 4, 2, 3, 256
EPISODES = int(sys.argv[1]) if __name__ == "__main__" and sys.argv[1:] else 1024
KEY = "a-key"
GAMES = {"source": "generated", "kinds": ["pick_and_place_simple"], "rooms": ["Bathroom"]}
ENVIRONMENT = EnvironmentSettings(
    name="alfworld/text",
    args={"games": GAMES, "max_turns": TURNS, "image": {"form": "schematic", "image_size": 224}},
    train_tasks=EPISODES // GROUP,
    heldout_tasks=1,
)
PLAN = RolloutSettings(
    groups_per_step=EPISODES // GROUP, group_size=GROUP, sampling=SamplingSettings(max_tokens=8), seed=0
)


def measure() -> list[Row]:
    """Run this benchmark in the environment that has Ray, and return its rows."""
    if not RAY.exists():
        subprocess.run([sys.executable, "-m", "armature.setup", "ray"], cwd=ROOT, check=True)
    command = [str(RAY), "-m", "benchmarks.rollout_workers"]
    output = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True).stdout
    return [Row(**row) for row in json.loads(output.splitlines()[-1])]


class Footprint:
    """Records the peak memory of named groups of processes. The memory of a group is the sum of its processes' unique
    set sizes (USS), in bytes."""

    def __init__(self, groups: Callable[[], dict[str, list[psutil.Process]]]) -> None:
        self._groups, self.most = groups, dict[str, int]()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Footprint:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._done.wait(0.5):
            for name, processes in self._groups().items():
                self.most[name] = max(self.most.get(name, 0), sum(map(_unique, processes)))


def _unique(process: psutil.Process) -> int:
    try:
        return int(process.memory_full_info().uss)
    except psutil.NoSuchProcess:
        return 0


def _is(process: psutil.Process, module: str) -> bool:
    try:
        return module in process.cmdline() and "components/machine/process.py" not in " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return False


def _hosts() -> dict[str, list[psutil.Process]]:
    """Return a group of processes for each worker: the worker and the game processes that it has started."""
    every = [
        each for each in psutil.Process().children(recursive=True) if _is(each, "armature.components.rollouts.worker")
    ]
    return {str(each.pid): [each, *_players(each)] for each in every}


def _players(process: psutil.Process) -> list[psutil.Process]:
    children = process.children(recursive=True)
    return [each for each in children if _is(each, "armature.components.environments.alfworld.text.worker")]


class Measured:
    """Results: rollouts per second, seconds of the event loop per request, and the largest memory of a worker's process
    group in bytes."""

    def __init__(self, outputs: GenerateOutputs, wall: float, loop: float, hosts: Sequence[int]) -> None:
        assert len(outputs.trajectories) == EPISODES, outputs.drops
        requests = sum(len(each.turns) for each in outputs.trajectories)
        self.rate, self.loop, self.host = EPISODES / wall, loop / requests, max(hosts)


async def _timed(work: Callable[[], Any]) -> tuple[GenerateOutputs, float, float]:
    wall, loop = time.perf_counter(), time.thread_time()
    outputs = await work()
    return outputs, time.perf_counter() - wall, time.thread_time() - loop


def one_process(pool: ServerPool, scratch: Path, machine: Machine) -> Measured:
    environment = make_environment(ENVIRONMENT, HOSTS)
    tasks = list(environment.tasks("train"))
    ours = psutil.Process()

    async def play() -> tuple[GenerateOutputs, float, float]:
        async with pool:
            images, events = ImageStore(scratch / "images"), TerminalEvents()
            return await _timed(
                lambda: collect(
                    environment,
                    tasks,
                    GROUP,
                    pool,
                    images,
                    PLAN.sampling,
                    step=1,
                    seed=0,
                    machine=machine,
                    events=events,
                )
            )

    with closing(environment), Footprint(lambda: {"": [ours, *_players(ours)]}) as footprint:
        measured = asyncio.run(play())
    return Measured(*measured, list(footprint.most.values()))


def by_workers(pool: ServerPool, scratch: Path, machine: Machine, cluster: ClusterSettings) -> Measured:
    store = ArtifactStore(scratch / "store")
    with workers_on(cluster):
        workers = RolloutWorkers(PLAN, ENVIRONMENT, pool, store, machine, "0" * 20)
    tasks = list(make_environment(ENVIRONMENT, 1).tasks("train"))

    async def play() -> tuple[GenerateOutputs, float, float]:
        async with pool:
            events = TerminalEvents()
            return await _timed(lambda: workers.collect(tasks, events, step=1, first_group=0, name="rollouts"))

    with closing(workers), Footprint(_hosts) as footprint:
        measured = asyncio.run(play())
    assert len(footprint.most) == HOSTS
    return Measured(*measured, list(footprint.most.values()))


def slot() -> float:
    """Return the memory in bytes of one LIBERO simulator with images as large as in an evaluation."""
    with SimulatorProcess(simulator_settings(resolution=256), 600.0) as process:
        process.reset(suite_tasks("libero_spatial")[0], 0, 0)
        assert process.worker.pid is not None
        return float(psutil.Process(process.worker.pid).memory_full_info().uss)


def compare(address: str, scratch: Path) -> list[Row]:
    from tests.inference.conftest import write_checkpoint

    model = write_checkpoint(scratch / "look")  # the stand-in's answer, an action that is possible everywhere
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, str(ROOT / "tests/inference/stand_in.py"), f"--port={port}", f"--model={model}"]
    os.environ["VLLM_API_KEY"] = KEY
    machine = Machine(
        servers=MachineServers(endpoints=(f"http://127.0.0.1:{port}",)),
        workers=MachineWorkers(rollouts=HOSTS),
        limits=MachineLimits(max_concurrent=EPISODES, environment_timeout=600),
    )
    settings = ServerSettings(max_model_len=512, max_images_per_prompt=1, dtype="float32")

    def pool() -> ServerPool:
        return ServerPool(model, settings, machine, scratch / "logs")

    with ExitStack() as stack:
        stack.callback(Program(command, log=scratch / "server.log").stop)
        alone = one_process(pool(), scratch, machine)
        processes = machine.workers.model_copy(update={"environments": HOSTS})
        with_environments = machine.model_copy(update={"workers": processes})
        place = ClusterSettings(address=address, resources={"host": 1})
        workers = by_workers(pool(), scratch, with_environments, place)
    simulator = slot()
    shape = (
        f"{EPISODES:,} episodes at once, {TURNS} turns with an image of 224 pixels each, a stand-in for the servers; "
        "with workers, requests are on their loops"
    )
    return [
        Row("event loop of the run", 1e3 * workers.loop, 1e3 * alone.loop, "one process", "ms/turn", "lower", shape),
        Row(
            "memory of a host",
            workers.host / 2**20,
            alone.host / 2**20,
            "one process",
            "MiB",
            "lower",
            f"{HOSTS} hosts, each with a worker and a process of games, without Ray's own; one process with {HOSTS}",
        ),
        Row("rollouts", workers.rate, alone.rate, "one process", "/s", "higher", f"{os.cpu_count()} cores for all"),
        Row(
            f"memory of a host, {SLOTS} simulators of LIBERO",
            simulator * SLOTS / 16 / 2**30,
            simulator * SLOTS / 2**30,
            "all on one",
            "GiB",
            "lower",
            f"computed: {simulator / 2**20:.0f} MiB measured of one, 16 hosts",
        ),
    ]


def main() -> None:
    os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    import ray
    from ray.cluster_utils import Cluster

    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
        stack.callback(cluster.shutdown)
        stack.callback(ray.shutdown)
        for _ in range(HOSTS):
            cluster.add_node(num_cpus=1, resources={"host": 1}, object_store_memory=100_000_000)
        rows = compare(cluster.address, scratch)
    print(json.dumps([asdict(row) for row in rows]))


if __name__ == "__main__":
    main()
