"""Recipes on a Ray cluster of three nodes, each with a network, processes and a disk of its own, of which one loses its
raylet: they end with the weights of a run on one machine."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from armature.components.configuration import load_recipe
from armature.components.contracts.digests import file_digest
from armature.components.contracts.machine import Machine
from armature.components.inference.command import server_command, server_environment
from armature.components.inference.settings import ServerSettings
from armature.components.machine.process import Program
from tests.builders import make_machine
from tests.production.linear_trainer import CONTINUE, OUT, PAUSED, installed
from tests.production.linear_trainer import WEIGHTS as LINEAR
from tests.production.nodes import DISK, Network, Node, wait_for
from tests.production.recipe_stages import RECIPES, WEIGHTS
from tests.production.services import ONE_THREAD

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv-ray/bin/python"
"""Python interpreter of the project's environment that includes Ray."""
KEY = "a key for the tests"
SERVER, RANK = "vllm.entrypoints.openai.api_server", "armature.components.training.service"
PLAYERS = {
    "train-vlm": "armature.components.rollouts.worker",
    "train-vla": "armature.components.robots.libero.worker",
}
TOKEN = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0123456789abcdef" * 4, "RAY_USAGE_STATS_ENABLED": "0"}
ENVIRONMENT = {**ONE_THREAD, **TOKEN, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}

pytestmark = [
    pytest.mark.timeout(3000),
    pytest.mark.skipif(not PYTHON.exists(), reason="needs .venv-ray: make .venv-ray/.made"),
]


class RayCluster:
    """A Ray cluster: a head node without CPUs, on which runs begin, and nodes with CPUs."""

    def __init__(self, head: Node, nodes: Sequence[Node]) -> None:
        self.head, self._programs = head, dict[Node, Program]()
        start_ray(head, "--head", "--port=6379", "--num-cpus=0", "--include-dashboard=false", f"--temp-dir={DISK}/ray")
        for node in nodes:
            self.add(node)

    @property
    def address(self) -> str:
        return f"{self.head.address}:6379"

    def add(self, node: Node) -> None:
        self._programs[node] = start_ray(node, f"--address={self.address}", "--num-cpus=4")

    def players(self, module: str) -> dict[Node, list[psutil.Process]]:
        """Return the processes that run the Python module `module`, by node. Nodes without such processes are left
        out."""
        result = {node: [each for each in _family(program) if _runs(each, module)] for node, program in self._nodes()}
        return {node: processes for node, processes in result.items() if processes}

    def kill_raylet(self, node: Node) -> None:
        (raylet,) = (each for each in _family(self._programs[node]) if each.name() == "raylet")
        os.kill(raylet.pid, signal.SIGKILL)

    def _nodes(self) -> list[tuple[Node, Program]]:
        return list(self._programs.items())


def _family(program: Program) -> list[psutil.Process]:
    return [each for each in program.family() if each.is_running()]


def _runs(process: psutil.Process, module: str) -> bool:
    with suppress(psutil.NoSuchProcess):
        command = process.cmdline()
        return module in command and "components/machine/process.py" not in " ".join(command)
    return False


def start_ray(node: Node, *arguments: str) -> Program:
    memory = ("--object-store-memory=100000000", "--disable-usage-stats", "--block")
    command = [PYTHON, "-m", "ray.scripts.scripts", "start", f"--node-ip-address={node.address}", *arguments, *memory]
    (node.folder / "ray.log").unlink(missing_ok=True)
    program = node.start(command, ENVIRONMENT, "ray.log")
    wait_for(lambda: "Ray runtime started" in program.tail(50), program, 300)
    return program


@pytest.fixture(scope="module")
def ray_cluster(network: Network) -> RayCluster:
    return RayCluster(network.add("head"), [network.add(f"ray{number}") for number in range(3)])


def start(node: Node | None, folder: Path, recipe: str, *machine: str) -> Program:
    """Start a program that runs the stages of a recipe, on a node, or on this machine if `node` is None. Its store is
    in `folder`, a path on that machine."""
    facts = [f"machine.{fact}" for fact in (f'store="{folder}/store"', *machine)]
    command = [str(PYTHON), "-m", "tests.production.recipe_stages", recipe, *RECIPES[recipe], *facts]
    variables = {**ENVIRONMENT, "VLLM_API_KEY": KEY}
    if node is None:
        return Program(command, env=variables, log=folder / "run.log")
    return node.start(command, variables, f"{folder.name}.log")


def ended(program: Program) -> str:
    """Wait until a program of `start` has ended, and return the digest of the weights that it printed."""
    assert program.wait(1500) == 0, program.tail(60)
    return re.findall(f"{WEIGHTS}(.*)", program.tail(60))[0]  # Ray may speak of lost nodes after it


def serve(node: Node, recipe: str, model: Path) -> Program:
    """Start a model server on a node, at an address that all nodes can reach."""
    sections = load_recipe(recipe, RECIPES[recipe]).sections
    machine, inference = sections["machine"], sections["inference"]
    assert isinstance(machine, Machine) and isinstance(inference, ServerSettings)
    machine = make_machine(machine, servers__python=ROOT / ".venv-vllm/bin/python")
    command = server_command(model, inference, machine, port=8000, gpus=())
    command[command.index("--host") + 1] = node.address
    arguments = server_environment(machine, api_key=KEY, gpus=(), deterministic=True)
    served = {"PYTHONPATH": str(ROOT / "components/inference/served")}
    return node.start(
        command, {key: value for key, value in (arguments | served).items() if value is not None}, "vllm.log"
    )


@pytest.mark.parametrize("recipe", RECIPES)
def test_run_with_killed_raylet_has_the_weights_of_one_machine(
    ray_cluster: RayCluster, tmp_path: Path, recipe: str
) -> None:
    flow, _, name = recipe.partition("/")
    playing = PLAYERS[flow]
    began = time.monotonic()
    expected = ended(start(None, tmp_path, recipe))
    print(f"{recipe}: on one machine after {time.monotonic() - began:.0f} s, weights {expected}")
    place = f'cluster={{address="{ray_cluster.address}", start_timeout=300}}'
    machine = [place, "workers.environments=2", f'remote_store="{tmp_path}/remote"']
    server = None
    if flow == "train-vlm":
        (model,) = (each for each in (tmp_path / "store/model").iterdir() if each.is_dir())
        server = serve(ray_cluster.head, recipe, model)
        endpoint = f"http://{ray_cluster.head.address}:8000"
        machine += ["workers.rollouts=2", f'servers.endpoints=["{endpoint}"]', "limits.ready_timeout=600"]
    began = time.monotonic()
    run = start(ray_cluster.head, DISK / name, recipe, *machine)
    if flow == "train-vlm":
        history = f"{name}/store/workspaces/train-vlm-*/history.jsonl"
        wait_for(lambda: any(ray_cluster.head.folder.glob(history)), run, 900)
    wait_for(lambda: bool(ray_cluster.players(playing)), run, 600)
    time.sleep(0 if flow == "train-vlm" else 10)
    lost, players = next(iter(ray_cluster.players(playing).items()))
    ray_cluster.kill_raylet(lost)
    print(f"{recipe}: {lost.name} lost its raylet after {time.monotonic() - began:.0f} s")
    _, alive = psutil.wait_procs(players, timeout=60)
    assert not alive, "workers outlived their raylet"
    assert ended(run) == expected
    print(f"{recipe}: on the cluster after {time.monotonic() - began:.0f} s, the same weights")
    if server is not None:
        assert "is collected again" in run.tail(5000)
        assert not list((tmp_path / "remote/rollout-shards").glob("*/*"))
        images = ray_cluster.head.folder / name / "store/images"  # the workers' images arrived where the run is
        assert any(path.is_file() for path in images.rglob("*"))
        server.stop()
    ray_cluster.add(lost)


def test_run_with_lost_server_node_has_the_weights_of_one_machine(ray_cluster: RayCluster, tmp_path: Path) -> None:
    recipe = "train-vlm/colors"
    expected = ended(start(None, tmp_path, recipe))
    place = f'cluster={{address="{ray_cluster.address}", start_timeout=300, servers={{num_cpus=2}}}}'
    python = f'servers.python="{ROOT / ".venv-vllm/bin/python"}"'
    began = time.monotonic()
    # All nodes see the store: servers read the weights there.
    run = start(ray_cluster.head, tmp_path / "placed", recipe, place, python, "threads=1")
    wait_for(lambda: any(tmp_path.glob("placed/store/workspaces/train-vlm-*/history.jsonl")), run, 900)
    ((lost, servers),) = ray_cluster.players(SERVER).items()
    ray_cluster.kill_raylet(lost)
    print(f"{lost.name} lost its raylet, and the server, after {time.monotonic() - began:.0f} s")
    wait_for(lambda: bool(ray_cluster.players(SERVER).keys() - {lost}), run, 300)
    _, alive = psutil.wait_procs(servers, timeout=60)
    assert not alive, "the server outlived its raylet"
    assert ended(run) == expected
    output = run.tail(5000)
    print(f"on the cluster after {time.monotonic() - began:.0f} s, the same weights")
    assert "is removed from the pool" in output and "is back with version" in output
    ray_cluster.add(lost)


def test_run_with_disconnected_rank_has_the_weights_of_one_machine(
    ray_cluster: RayCluster, network: Network, tmp_path: Path
) -> None:
    """A linear model. The node has the first rank, which answers the run."""
    (tmp_path / "installed").mkdir()
    command = [str(PYTHON), "-m", "tests.production.linear_trainer"]
    trainer = {"loader_workers": 0, "environment": {"PYTHONPATH": installed(tmp_path / "installed")}}
    facts = {"threads": 1, "limits": {"node_timeout": 20}}
    here, there = tmp_path / "here", tmp_path / "there"
    for folder in (here, there):
        folder.mkdir()
    (here / CONTINUE).touch()
    one_node = json.dumps({**facts, "trainer": {**trainer, "processes": 2}})
    alone = Program([*command, here, one_node], env=ENVIRONMENT, log=here / "log")
    assert alone.wait(600) == 0, alone.tail(60)
    place = {
        "address": ray_cluster.address,
        "start_timeout": 300,
        "trainer": {"num_cpus": 1, "strategy": "STRICT_SPREAD"},
    }
    two_nodes = json.dumps({**facts, "trainer": {**trainer, "nodes": 2}, "cluster": place})
    run = ray_cluster.head.start([*command, there, two_nodes], ENVIRONMENT, "linear.log")
    wait_for((there / PAUSED).exists, run, 600)
    began, ranks = time.monotonic(), ray_cluster.players(RANK)
    assert len(ranks) == 2
    address = next(there.rglob("address.json")).read_text()
    lost, gone = next(result for result in ranks.items() if f"{result[0].address}:" in address)
    with network.unplugged(lost):
        (there / CONTINUE).touch()
        assert run.wait(600) == 0, run.tail(60)
        print(f"{lost.name} lost its network, and a rank; finished after {time.monotonic() - began:.0f} s")
    _, alive = psutil.wait_procs(gone, timeout=120)  # without a network it does not hear that it has been replaced
    assert not alive, "the rank outlived its place in the training"
    assert "the trainer died after step" in run.tail(5000)
    assert file_digest(there / OUT / LINEAR) == file_digest(here / OUT / LINEAR)
    ray_cluster.add(lost)


def test_run_with_lost_trainer_node_has_the_weights_of_one_machine(ray_cluster: RayCluster, tmp_path: Path) -> None:
    recipe = "train-vlm/colors"
    expected = ended(start(None, tmp_path, recipe, "trainer.processes=2", "threads=1"))
    trainer = 'trainer={num_cpus=1, strategy="STRICT_SPREAD"}'
    place = f'cluster={{address="{ray_cluster.address}", start_timeout=300, {trainer}}}'
    python = f'servers.python="{ROOT / ".venv-vllm/bin/python"}"'
    began = time.monotonic()
    # All nodes see the store: ranks read batches and checkpoints there.
    run = start(ray_cluster.head, tmp_path / "placed", recipe, place, "trainer.nodes=2", python, "threads=1")
    wait_for(lambda: any(tmp_path.glob("placed/store/workspaces/train-vlm-*/history.jsonl")), run, 900)
    lost, ranks = min(ray_cluster.players(RANK).items(), key=lambda result: result[0].name)
    assert len(ray_cluster.players(RANK)) == 2
    ray_cluster.kill_raylet(lost)
    print(f"{lost.name} lost its raylet, and a rank, after {time.monotonic() - began:.0f} s")
    wait_for(lambda: len(ray_cluster.players(RANK).keys() - {lost}) == 2, run, 300)
    _, alive = psutil.wait_procs(ranks, timeout=60)
    assert not alive, "the rank outlived its raylet"
    assert ended(run) == expected
    print(f"on the cluster after {time.monotonic() - began:.0f} s, the same weights")
    assert "the trainer died after step" in run.tail(5000)
    ray_cluster.add(lost)


def test_drill_signals_processes_on_nodes_and_finds_the_same_weights(ray_cluster: RayCluster, tmp_path: Path) -> None:
    """The drill kills a rank and an actor of its run, which are not processes of the machine on which it begins."""
    servers, trainer = "servers={num_cpus=2}", "trainer={num_cpus=1}"
    place = f'cluster={{address="{ray_cluster.address}", start_timeout=300, {servers}, {trainer}}}'
    python = f'servers.python="{ROOT / ".venv-vllm/bin/python"}"'
    command = [str(PYTHON), "-m", "armature", "drill", "--runs", "1", "--seed", "12", "--folder", str(tmp_path / "new")]
    for fact in (place, "workers.rollouts=2", python, "threads=1"):
        command += ["--machine", fact]
    began = time.monotonic()
    drill = ray_cluster.head.start(command, ENVIRONMENT, "drill.log")
    assert drill.wait(2400) == 0, drill.tail(60)
    output = drill.tail(60)
    print(f"{output}\nafter {time.monotonic() - began:.0f} s")
    assert re.search(r"kill rank, .*process \d+ on ray\d", output)
    assert re.search(r"kill actor, .*process \d+ on ray\d", output)
    assert not (tmp_path / "new").exists()
