"""Recipes as jobs of SLURM: Debian's munged, slurmctld and slurmd, each node a machine of its own."""

from __future__ import annotations

import re
import secrets
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from armature import slurm
from tests.production.nodes import DISK, Network, Node, wait_for
from tests.production.services import OFFLINE, ONE_THREAD
from tests.production.tiny_policy import TRAINING, steps_done, weights
from tests.vla.conftest import write_dataset

MISSING = [name for name in ("munged", "slurmctld", "slurmd", "sbatch") if shutil.which(name) is None]

pytestmark = [
    pytest.mark.timeout(1200),
    pytest.mark.skipif(bool(MISSING), reason=f"apt-get install slurmctld slurmd slurm-client munge: {MISSING}"),
]

RECIPE, TWO = "train-vla/tiny", ["--set", "machine.trainer_nodes=2", "--set", "machine.trainer_interface=eth0"]
CONFIGURATION = """\
ClusterName=test
SlurmctldHost=controller
SlurmUser=root
AuthInfo=socket=/srv/munge.socket,cred_expire=5
StateSaveLocation=/srv/state
SlurmdSpoolDir=/srv/spool
SlurmctldPidFile=/srv/slurmctld.pid
SlurmdPidFile=/srv/slurmd.pid
ProctrackType=proctrack/linuxproc
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
SlurmdTimeout=15
KillWait=5
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
"""
"""Each node has its own munged; cores and memory are as many as the jobs ask for."""
PROGRAM = """\
#!/bin/bash
echo "$3 after ${SLURM_RESTART_COUNT:-0}"
if [ "$3" = join ]; then while [ -d "$4" ]; do sleep 0.2; done; exit; fi
until [ -e end ]; do sleep 0.2; done
exit "$(cat end)"
"""
"""What the script starts in place of `python -m armature run` and `join`."""
PARTITIONS = """\
PartitionName=main Nodes=ALL Default=YES PriorityTier=1 GraceTime=60
PartitionName=urgent Nodes=ALL PriorityTier=2
"""


@dataclass(frozen=True)
class Cluster:
    """SLURM, and a folder that all nodes see."""

    controller: Node
    nodes: dict[str, Node]
    folder: Path

    def run(self, *command: str) -> str:
        return self.controller.run(["env", "-C", self.folder, *command], self.environment)

    @property
    def environment(self) -> dict[str, str]:
        root = str(Path(__file__).parents[2])
        return {**ONE_THREAD, **OFFLINE, "SLURM_CONF": str(self.folder / "slurm.conf"), "PYTHONPATH": root}

    def submit(self, recipe: str, *words: str) -> str:
        return self.run("python", "-m", "armature", "submit", recipe, "--slurm", *words).strip()

    def job(self, number: str) -> dict[str, str]:
        """What scontrol says of a job."""
        words = self.run("scontrol", "--oneliner", "show", "job", number).split()
        return dict(word.partition("=")[::2] for word in words)

    def hosts(self, number: str) -> list[str]:
        return self.run("scontrol", "show", "hostnames", self.job(number)["NodeList"]).split()

    def wait_until(self, number: str, condition: Callable[[dict[str, str]], bool]) -> None:
        end = time.monotonic() + 600
        while not condition(job := self.job(number)):
            assert job["JobState"] not in ("COMPLETED", "FAILED") and time.monotonic() < end, self.log(number)
            time.sleep(0.5)

    def log(self, number: str) -> str:
        file = self.folder / f"slurm-{number}.out"
        return file.read_text() if file.exists() else ""

    def wait_for_start(self, number: str, restarts: int) -> None:
        """Until the programs of both nodes run, after so many restarts."""
        self.wait_until(number, lambda _: len(re.findall(rf"(?:run|join) after {restarts}\n", self.log(number))) == 2)


@pytest.fixture(scope="module")
def cluster(network: Network, tmp_path_factory: pytest.TempPathFactory) -> Cluster:
    """A controller and four nodes: the jobs have two, and two tests lose one."""
    folder = tmp_path_factory.mktemp("shared")
    controller = network.add("controller")
    nodes = {name: network.add(name) for name in ("node1", "node2", "node3", "node4")}
    lines = [f"NodeName={name} NodeAddr={node.address} CPUs=8 RealMemory=64000" for name, node in nodes.items()]
    (folder / "slurm.conf").write_text("\n".join([CONFIGURATION, *lines, PARTITIONS]))
    made = Cluster(controller, nodes, folder)
    key = secrets.token_bytes(128)
    for node in (controller, *nodes.values()):
        start_munged(node, key)
    (controller.folder / "state").mkdir()
    started = controller.start(["slurmctld", "-D", "-i"], made.environment, "slurmctld.log")
    for node in nodes.values():
        (node.folder / "spool").mkdir()
        node.start(["slurmd", "-D"], made.environment, "slurmd.log")
    wait_for(lambda: made.run("sinfo", "--noheader", "--format=%T,%D").strip() == "idle,4", started)
    return made


def start_munged(node: Node, key: bytes) -> None:
    (node.folder / "munge.key").write_bytes(key)
    (node.folder / "munge.key").chmod(0o600)
    files = [f"--{name}-file={DISK}/munge.{name}" for name in ("key", "pid", "log", "seed")]
    started = node.start(["munged", "--foreground", f"--socket={DISK}/munge.socket", *files], log="munged.log")
    wait_for((node.folder / "munge.socket").exists, started)


@pytest.fixture
def script(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The job of a recipe, with a program in place of `python -m armature` that ends as the file `end` says."""
    program = cluster.folder / "program"
    program.write_text(PROGRAM)
    program.chmod(0o755)
    (cluster.folder / "end").unlink(missing_ok=True)
    monkeypatch.setattr(sys, "executable", str(program))
    monkeypatch.chdir(cluster.folder)
    file = cluster.folder / "job.sh"
    file.write_text(slurm.script(RECIPE, TWO[1::2], []))
    return file


def test_a_job_is_taken_up_when_its_time_is_over_when_it_is_preempted_and_when_a_node_is_lost(cluster, script):
    number = cluster.run("sbatch", "--parsable", str(script)).strip()
    cluster.wait_for_start(number, 0)
    cluster.run("scancel", "--batch", "--signal=USR1", number)  # as SLURM does when the time limit is near
    cluster.wait_for_start(number, 1)
    cluster.run("sbatch", "--partition=urgent", "--nodes=3", "--exclusive", "--output=urgent.out", "--wrap=true")
    cluster.wait_for_start(number, 2)
    lost = cluster.hosts(number)[1]
    cluster.nodes[lost].kill()
    cluster.wait_for_start(number, 3)
    assert lost not in cluster.hosts(number)
    assert [each.name for each in (cluster.folder / ".armature/slurm").iterdir()] == [f"{number}-3"]
    (cluster.folder / "end").write_text("0")
    cluster.wait_until(number, lambda job: job["JobState"] == "COMPLETED")
    assert not list((cluster.folder / ".armature/slurm").iterdir())


def test_a_run_that_fails_ends_its_job(cluster, script):
    (cluster.folder / "end").write_text("3")
    number = cluster.run("sbatch", "--parsable", str(script)).strip()
    cluster.wait_until(number, lambda job: job["JobState"] == "FAILED")
    assert (cluster.job(number)["ExitCode"], cluster.job(number)["Restarts"]) == ("3:0", "0")


def test_what_slurm_refuses_is_said_in_its_words(cluster):
    with pytest.raises(AssertionError, match="invalid partition specified: nowhere"):
        cluster.submit(RECIPE, *TWO, "--", "--partition=nowhere")


def test_options_arrive_as_they_were_given(cluster):
    comment = 'it\'s \\ "a b" # $HOME `x`'
    number = cluster.submit(RECIPE, *TWO, "--", "--hold", f"--comment={comment}", "--time=1:00:00", "--nodes=3")
    assert cluster.run("squeue", "--noheader", f"--job={number}", "--Format=comment:80").strip() == comment
    assert cluster.job(number)["TimeLimit"] == "01:00:00" and cluster.job(number)["NumNodes"].startswith("3")
    cluster.run("scancel", number)


@pytest.fixture(scope="module")
def expected(cluster: Cluster) -> str:
    """The weights of TRAINING without SLURM, by two processes of one machine."""
    write_dataset(cluster.folder / "data", 6)
    (cluster.folder / "training.toml").write_text(TRAINING)
    (cluster.folder / "nodes").mkdir()
    armature = ["env", "-C", cluster.folder, "python", "-m", "armature"]
    lo = ["--machine=trainer_interface=lo", "--machine=trainer_rendezvous=nodes"]
    other = cluster.controller.start([*armature, "join", "nodes"], cluster.environment, "join.log")
    cluster.controller.run([*armature, "run", "training.toml", *lo], cluster.environment, 600)
    shutil.rmtree(cluster.folder / "nodes")
    assert other.wait(60) == 0, other.tail()
    return weights(cluster.folder / ".armature/store")


def test_a_training_that_loses_a_node_ends_with_the_weights_that_it_has_without_slurm(cluster, expected):
    store = cluster.folder / ".armature/store"

    number = cluster.submit("training.toml", "--machine", "trainer_interface=eth0")
    cluster.wait_until(number, lambda _: steps_done(store) > 25)
    first = cluster.hosts(number)[0]
    cluster.nodes[first].kill()
    cluster.wait_until(number, lambda job: job["JobState"] == "COMPLETED")
    job = cluster.job(number)
    assert first not in cluster.hosts(number) and (job["NumNodes"], job["Restarts"]) == ("2", "1")
    assert "resuming after step" in cluster.log(number)
    assert weights(store) == expected
