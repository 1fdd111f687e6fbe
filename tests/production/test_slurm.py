"""Recipes as jobs of SLURM whose nodes are one Ray cluster: Debian's munged, slurmctld and slurmd, and Ray's launcher.

Each node is a machine of its own."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import psutil
import pytest

from armature import slurm
from tests.production.nodes import DISK, Network, Node, wait_for
from tests.production.services import OFFLINE, ONE_THREAD
from tests.robots.imitation.conftest import write_dataset

ENVIRONMENT = Path(__file__).parents[2] / ".venv-ray/bin"
"""Folder of the programs of the project's environment that includes Ray."""
PYTHON = ENVIRONMENT / "python"
MISSING = [name for name in ("munged", "slurmctld", "slurmd", "sbatch", PYTHON) if shutil.which(name) is None]

pytestmark = [
    pytest.mark.timeout(1200),
    pytest.mark.skipif(
        bool(MISSING), reason=f"apt-get install slurmctld slurmd slurm-client munge; make .venv-ray/.made: {MISSING}"
    ),
]

PLACE = 'machine.cluster={address="auto", trainer={num_cpus=2}}'
RECIPE, TWO = "train-vla/tiny", ["--set", "machine.trainer.nodes=2", "--set", PLACE]
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
"""Configuration of SLURM. Each node has its own munged, and as many cores and as much memory as the jobs request."""
PROGRAM = """\
#!/bin/bash
echo "run after ${SLURM_RESTART_COUNT:-0} with $RAY_AUTH_MODE"
until [ -e end ]; do sleep 0.2; done
exit "$(cat end)"
"""
"""Shell script that replaces `python -m armature run`. It runs until the file `end` exists, and ends with the exit code
in it."""
TRAINING = """\
flow = "train-vla"
description = "A tiny policy, which trains for half a minute."
dataset.path = "data"

[policy]
setup_type = "an arm"
control_mode = "velocities"
chunk_size = 3
n_action_steps = 3
dtype = "float32"

[policy.tiny]
hidden_size = 32
intermediate_size = 48
heads = 2
vision_hidden_size = 16
vision_intermediate_size = 24
vision_heads = 2
image_side = 28
expert_hidden_size = 32
expert_heads = 2
corpus = ["move the arm to the block", "close the gripper now", "an arm", "velocities"]

[training]
freeze_embedding = false
learning_rates = { vlm = 1e-3, vit = 1e-3, connector = 1e-3, action_expert = 1e-3 }
max_steps = 120
batch_size = 4
micro_batch_size = 2
save_every = 10
heldout = { fraction = 0.25, frames = 4, every = 120 }

[machine]
threads = 1
trainer.loader_workers = 0
"""
PARTITIONS = """\
PartitionName=main Nodes=ALL Default=YES PriorityTier=1 GraceTime=60
PartitionName=urgent Nodes=ALL PriorityTier=2
"""


@dataclass(frozen=True)
class Cluster:
    """A SLURM cluster: its controller, its nodes by name, and a folder that all of them share."""

    controller: Node
    nodes: dict[str, Node]
    folder: Path

    def run(self, *command: str) -> str:
        return self.controller.run(["env", "-C", self.folder, *command], self.environment)

    @property
    def environment(self) -> dict[str, str]:
        root = str(Path(__file__).parents[2])
        ours = {"SLURM_CONF": str(self.folder / "slurm.conf"), "PYTHONPATH": root, "RAY_TMPDIR": f"{DISK}/tmp"}
        return {**ONE_THREAD, **OFFLINE, **ours}

    def submit(self, recipe: str, *words: str) -> str:
        return self.run(str(PYTHON), "-m", "armature", "submit", recipe, "--slurm", *words).strip()

    def job(self, number: str) -> dict[str, str]:
        """Return the fields that scontrol prints for a job, by name."""
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
        """Wait until the program of a job runs for the time after `restarts` restarts of the job."""
        self.wait_until(number, lambda _: f"run after {restarts} with token" in self.log(number))


@pytest.fixture(scope="module")
def cluster(network: Network, tmp_path_factory: pytest.TempPathFactory) -> Cluster:
    """A cluster with a controller and four nodes. A job uses two nodes, and two tests each lose one node."""
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
    """The job script of a recipe, in which `PROGRAM` replaces `python -m armature run`."""
    program = cluster.folder / "program"
    program.write_text(PROGRAM)
    program.chmod(0o755)
    (cluster.folder / "ray").unlink(missing_ok=True)
    (cluster.folder / "ray").symlink_to(ENVIRONMENT / "ray")
    (cluster.folder / "end").unlink(missing_ok=True)
    monkeypatch.setattr(sys, "executable", str(program))
    monkeypatch.chdir(cluster.folder)
    file = cluster.folder / "job.sh"
    file.write_text(slurm.script(RECIPE, TWO[1::2], []))
    return file


def test_slurm_job_resumes_after_time_limit_preemption_and_lost_node(cluster, script):
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
    (cluster.folder / "end").write_text("0")
    cluster.wait_until(number, lambda job: job["JobState"] == "COMPLETED")


@pytest.mark.parametrize(("starts", "code"), [(True, 3), (False, 1)], ids=["run", "launcher"])
def test_failed_run_fails_its_slurm_job(cluster, script, starts, code):
    (cluster.folder / "end").write_text("3")
    if not starts:  # the launcher's exit code is 0 then
        (cluster.folder / "ray").unlink()
        (cluster.folder / "ray").symlink_to(shutil.which("true"))
    number = cluster.run("sbatch", "--parsable", str(script)).strip()
    cluster.wait_until(number, lambda job: job["JobState"] == "FAILED")
    assert (cluster.job(number)["ExitCode"], cluster.job(number)["Restarts"]) == (f"{code}:0", "0")


def test_slurm_refusal_includes_its_message(cluster):
    with pytest.raises(AssertionError, match="invalid partition specified: nowhere"):
        cluster.submit(RECIPE, *TWO, "--", "--partition=nowhere")


def test_sbatch_receives_options_unchanged(cluster):
    comment = 'it\'s \\ "a b" # $HOME `x`'
    number = cluster.submit(RECIPE, *TWO, "--", "--hold", f"--comment={comment}", "--time=1:00:00", "--nodes=3")
    assert cluster.run("squeue", "--noheader", f"--job={number}", "--Format=comment:80").strip() == comment
    assert cluster.job(number)["TimeLimit"] == "01:00:00" and cluster.job(number)["NumNodes"].startswith("3")
    cluster.run("scancel", number)


def steps_done(store: Path) -> int:
    """Return the number of steps that the training in this store has finished."""
    histories = list(store.glob("workspaces/train-vla-*/history.jsonl"))
    return len(histories[0].read_text().splitlines()) if histories else 0


def weights(store: Path) -> str:
    """Return the digest of the trained weights in a store, and delete the training from the store."""
    (file,) = store.glob("train-vla/*/checkpoint/model.safetensors")
    digest = sha256(file.read_bytes()).hexdigest()
    for made in (store / "train-vla", *store.glob("workspaces/train-vla-*")):
        shutil.rmtree(made)
    return digest


def raylet_of(node: Node) -> psutil.Process:
    (result,) = (each for each in psutil.Process(node.pid).children(recursive=True) if each.name() == "raylet")
    return result


@pytest.fixture(scope="module")
def expected(cluster: Cluster) -> str:
    """The digest of the weights that `TRAINING` gives without SLURM, with two ranks on one machine."""
    write_dataset(cluster.folder / "data", 6)
    (cluster.folder / "training.toml").write_text(TRAINING)
    armature = ["env", "-C", str(cluster.folder), str(PYTHON), "-m", "armature"]
    cluster.controller.run(
        [*armature, "run", "training.toml", "--machine=trainer.processes=2"], cluster.environment, 600
    )
    return weights(cluster.folder / ".armature/store")


@pytest.mark.parametrize("lost", ["first node", "second raylet", "first raylet"])
def test_training_with_lost_slurm_node_has_the_weights_of_one_machine(cluster, expected, lost):
    store = cluster.folder / ".armature/store"
    number = cluster.submit("training.toml", *TWO)
    cluster.wait_until(number, lambda _: steps_done(store) > 25)
    which, _, what = lost.partition(" ")
    name = cluster.hosts(number)[which == "second"]
    if what == "node":
        cluster.nodes[name].kill()
    else:
        os.kill(raylet_of(cluster.nodes[name]).pid, signal.SIGKILL)
    if lost == "first raylet":  # the head of the cluster, and the run with it
        cluster.wait_until(number, lambda job: job["JobState"] == "FAILED")
        assert cluster.job(number)["ExitCode"] != "0:0"
        number = cluster.submit("training.toml", *TWO)
    cluster.wait_until(number, lambda job: job["JobState"] == "COMPLETED")
    job, log = cluster.job(number), cluster.log(number)
    assert (job["NumNodes"], job["Restarts"]) == ("2", "1" if what == "node" else "0")
    assert ("the trainer died after step" if which == "second" else "resuming after step") in log
    assert weights(store) == expected
    if what == "node":
        assert name not in cluster.hosts(number)
