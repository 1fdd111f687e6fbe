"""The trainer's ranks on nodes of a Ray cluster: a linear model; service, ranks and checkpoints as of any other."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from armature.components.contracts.errors import ArmatureError, ConfigurationError
from armature.components.contracts.machine import Machine
from tests.builders import make_machine
from tests.production.linear_trainer import (
    CONTINUE,
    OUT,
    PAUSED,
    WEIGHTS,
    LinearClient,
    LinearTraining,
    installed,
    train,
)

ONE_THREAD: dict[str, Any] = {"threads": 1, "loader_workers": 0, "ready_timeout": 120}
SAYS_ITS_DEVICE = """
import json, os
if "RANK" in os.environ:
    names = ("RANK", "LOCAL_RANK", "CUDA_VISIBLE_DEVICES")
    with open(os.path.join(os.path.dirname(__file__), "rank-" + os.environ["RANK"]), "w") as file:
        json.dump({name: os.environ.get(name) for name in names}, file)
"""
"""Text of a `sitecustomize` module, which Python runs before each program. It records the rank's environment."""


@pytest.fixture
def python_path(tmp_path: Path) -> str:
    (tmp_path / "installed").mkdir()
    return installed(tmp_path / "installed")


def machine(address: str, bundle: Mapping[str, Any], python_path: str, **facts: Any) -> Machine:
    place = {"address": address, "start_timeout": 60.0, "trainer": {"num_cpus": 1, **bundle}}
    return make_machine(**ONE_THREAD, trainer__environment={"PYTHONPATH": python_path}, cluster=place, **facts)


def ranks_on(node: Any) -> list[psutil.Process]:
    """Return the processes of trainer ranks on this Ray node."""
    raylet = psutil.Process(node.all_processes["raylet"][0].process.pid)
    result = []
    for process in raylet.children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if process.cmdline()[1:3] == ["-m", "armature.components.training.service"]:
                result.append(process)
    return result


@pytest.fixture
def nodes(ray_cluster: Any) -> Iterator[list[Any]]:
    """Three Ray nodes. Each has resources for the trainer ranks of one node."""
    made = [ray_cluster.add_node(num_cpus=2, resources={"training": 1}) for _ in range(3)]
    yield made
    for node in made:
        ray_cluster.remove_node(node)


def test_ranks_on_two_nodes_survive_a_lost_node(ray_cluster, nodes, tmp_path, python_path, capsys):
    here, there = tmp_path / "here", tmp_path / "there"
    for folder in (here, there):
        folder.mkdir()
    (here / CONTINUE).touch()
    local = make_machine(**ONE_THREAD, trainer__environment={"PYTHONPATH": python_path}, trainer__processes=2)
    train(here, local)
    lost = list[psutil.Process]()

    def lose_one() -> None:
        while not (there / PAUSED).exists():
            time.sleep(0.05)
        busy = [node for node in nodes if ranks_on(node)]
        assert len(busy) == 2
        lost.extend(ranks_on(busy[1]))
        nodes.remove(busy[1])
        ray_cluster.remove_node(busy[1], allow_graceful=False)
        (there / CONTINUE).touch()

    losing = threading.Thread(target=lose_one)
    losing.start()
    bundle = {"resources": {"training": 1}, "strategy": "STRICT_SPREAD"}
    train(there, machine(ray_cluster.address, bundle, python_path, trainer__nodes=2))
    losing.join()
    _, alive = psutil.wait_procs(lost, timeout=30)
    assert len(lost) == 1 and not alive
    assert re.search("the trainer died after step [0-9]+; starting it again", capsys.readouterr().out)
    assert (there / OUT / WEIGHTS).read_bytes() == (here / OUT / WEIGHTS).read_bytes()
    assert not any(map(ranks_on, nodes))


def test_each_rank_has_its_own_gpu(ray_cluster, tmp_path, python_path):
    """Ray counts GPUs that it is told of; the ranks end for want of them, after they said which they were given."""
    node = ray_cluster.add_node(num_cpus=2, num_gpus=4, resources={"cards": 2})
    output = tmp_path / "said"
    output.mkdir()
    (output / "sitecustomize.py").write_text(SAYS_ITS_DEVICE)
    bundle = {"num_gpus": 2, "resources": {"cards": 1}}
    facts: dict[str, Any] = {"trainer__nodes": 2, "trainer__processes": 2}
    placed = machine(ray_cluster.address, bundle, f"{output}:{python_path}", **facts)
    with (
        pytest.raises(ArmatureError, match=r"(?i)cuda|nvidia"),
        LinearClient(LinearTraining(), placed, tmp_path / "trainer"),
    ):
        raise AssertionError("there are no GPUs")
    ranks = [json.loads(file.read_text()) for file in output.glob("rank-*")]
    devices = {int(each["RANK"]): each["CUDA_VISIBLE_DEVICES"].split(",")[int(each["LOCAL_RANK"])] for each in ranks}
    assert devices.keys() == {0, 1, 2, 3} and sorted(devices.values()) == ["0", "1", "2", "3"]
    ray_cluster.remove_node(node)


@pytest.mark.parametrize(
    ("bundle", "nodes", "numbers"),
    [
        ({"resources": {"desks": 1000}}, 1, {"1000"}),
        ({"resources": {"desks": 1}, "strategy": "STRICT_SPREAD"}, 2, {"2", "STRICT_SPREAD"}),
        ({"resources": {"desks": 3}, "strategy": "STRICT_PACK"}, 2, {"2", "STRICT_PACK"}),
    ],
    ids=["too large", "on different nodes", "on one node"],
)
def test_missing_room_is_an_error_with_requested_resources(ray_cluster, tmp_path, python_path, bundle, nodes, numbers):
    """One node has what is asked for: four of them, which are free."""
    node = ray_cluster.add_node(num_cpus=4, resources={"desks": 4})
    placed = machine(ray_cluster.address, bundle, python_path, trainer__nodes=nodes)
    assert placed.cluster is not None
    impatient = placed.model_copy(update={"cluster": placed.cluster.model_copy(update={"start_timeout": 1.0})})
    client = LinearClient(LinearTraining(), impatient, tmp_path / "trainer")
    with pytest.raises(ConfigurationError) as refusal, client:
        raise AssertionError
    wanted, free = refusal.value.what.split(" free on all nodes ")
    assert refusal.value.where == "machine.cluster.trainer"
    assert numbers <= set(re.findall(r"\w+", wanted)) and "'desks': 4.0" in free
    ray_cluster.remove_node(node)
