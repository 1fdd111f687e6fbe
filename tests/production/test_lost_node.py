"""Nodes of one training are lost, and others take their places: its weights are those of an undisturbed training."""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from armature.components.process import Program
from armature.components.training.processes import RENDEZVOUS, private_folder
from tests.production.linear_trainer import CONTINUE, OUT, PAUSED, WEIGHTS, installed
from tests.production.nodes import Network, Node, wait_for
from tests.production.services import ONE_THREAD

ROOT = Path(__file__).parents[2]
NOTICED = 120.0
"""Seconds, with the time limits of a user who sets none."""
RANK = """
from datetime import timedelta
from armature.components.training import launch
from armature.components.training.processes import TrainerProcesses

launch.CONNECT = timedelta(seconds=5)
with launch.joined(TrainerProcesses(threads=1), seed=0):
    raise AssertionError("they are cut off from each other")
"""

pytestmark = pytest.mark.timeout(900)


@dataclass(frozen=True)
class Training:
    """In a folder that all nodes see under the same name."""

    folder: Path
    environment: Mapping[str, str]

    def run(self, node: Node, **machine: Any) -> Program:
        facts = json.dumps({"threads": 1, "loader_workers": 0, **machine})
        command = ["python", "-m", "tests.production.linear_trainer", self.folder, facts]
        return node.start(command, self.environment, "run.log")

    def run_on_two(self, first: Node) -> Program:
        return self.run(first, trainer_nodes=2, trainer_interface=first.address)

    def join(self, node: Node, first: Program) -> Program:
        """As the first node says."""
        wait_for(lambda: "armature join " in first.tail(100), first)
        (job,) = set(re.findall(r"armature join ([^\s`]+)", first.tail(100)))
        return node.start(["python", "-m", "armature", "join", job], self.environment, "join.log")

    def has(self, name: str) -> bool:
        return (self.folder / name).exists()

    @property
    def weights(self) -> str:
        return hashlib.sha256((self.folder / OUT / WEIGHTS).read_bytes()).hexdigest()


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, str]:
    """Of nodes on which a package is installed that adds the trainer."""
    return {**ONE_THREAD, "PYTHONPATH": installed(tmp_path_factory.mktemp("installed"))}


def new_training(folder: Path, environment: Mapping[str, str]) -> Training:
    folder.mkdir()
    return Training(folder, environment)


@pytest.fixture(scope="module")
def weights(network: Network, tmp_path_factory: pytest.TempPathFactory, environment: Mapping[str, str]) -> str:
    """Of the training of two ranks on one node that nothing disturbs."""
    training = new_training(tmp_path_factory.mktemp("undisturbed") / "training", environment)
    (training.folder / CONTINUE).touch()
    program = training.run(add(network, "alone"), trainer_processes=2)
    assert program.wait(600) == 0, program.tail(60)
    return training.weights


def add(network: Network, name: str) -> Node:
    """A node as Debian's installer makes it: its own name is an address of the loopback."""
    node = network.add(name)
    (node.folder / "hosts").write_text(f"127.0.0.1 localhost\n127.0.1.1 {name}\n")
    node.run(["mount", "--bind", "/srv/hosts", "/etc/hosts"])
    assert node.run(["hostname", "-i"]).strip() == "127.0.1.1"
    return node


def test_a_node_without_a_network_is_noticed_and_replaced(
    network: Network, tmp_path: Path, weights: str, environment: Mapping[str, str]
) -> None:
    a, b, c = (add(network, name) for name in ("a", "b", "c"))
    for change in (["down"], ["name", "wan0"], ["up"]):  # interfaces have other names there
        b.run(["ip", "link", "set", "wan0" if change == ["up"] else "eth0", *change])
    training = new_training(tmp_path / "training", environment)
    first = training.run_on_two(a)
    isolated = training.join(b, first)
    wait_for(lambda: training.has(PAUSED), first)
    with network.unplugged(b):
        began = time.monotonic()
        (training.folder / CONTINUE).touch()
        wait_for(lambda: f"node b ({b.address}): no answer" in first.tail(100), first, NOTICED)
        print(f"noticed after {time.monotonic() - began:.0f} s")
        replacement = training.join(c, first)
        assert first.wait(600) == 0, first.tail(60)
        print(f"finished after {time.monotonic() - began:.0f} s")
        assert replacement.wait(60) == 0, replacement.tail(60)
        assert isolated.wait(60) == 0, isolated.tail(60)
    assert f"the first node does not answer at {a.address}" in isolated.tail(100)
    assert training.weights == weights


def test_the_first_node_is_replaced(
    network: Network, tmp_path: Path, weights: str, environment: Mapping[str, str]
) -> None:
    a, b, c = (add(network, name) for name in ("d", "e", "f"))
    training = new_training(tmp_path / "training", environment)
    first = training.run_on_two(a)
    other = training.join(b, first)
    wait_for(lambda: training.has(PAUSED), first)
    a.kill()
    began = time.monotonic()
    (training.folder / CONTINUE).touch()
    again = training.run_on_two(c)
    assert again.wait(600) == 0, again.tail(60)
    print(f"finished after {time.monotonic() - began:.0f} s")
    assert "resuming after step 10" in again.tail(100)
    assert other.wait(60) == 0, other.tail(60)
    assert training.weights == weights


def test_ranks_that_cannot_connect_say_where(network: Network, tmp_path: Path) -> None:
    nodes = [add(network, name) for name in ("g", "h")]
    nodes[1].run(["ip", "route", "add", "blackhole", f"{nodes[0].address}/32"])
    meeting = {RENDEZVOUS: str(private_folder(tmp_path / "meeting") / "store"), "GLOO_SOCKET_IFNAME": "eth0"}
    variables = {**ONE_THREAD, **meeting, "PYTHONPATH": str(ROOT), "WORLD_SIZE": "2"}
    ranks = [node.start(["python", "-c", RANK], {**variables, "RANK": str(rank)}) for rank, node in enumerate(nodes)]
    for rank, (node, program) in enumerate(zip(nodes, ranks, strict=True)):
        assert program.wait(120) == 1
        assert f"rank {rank} cannot connect" in program.tail() and f"{node.name}, interface eth0" in program.tail()
