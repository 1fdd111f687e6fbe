"""Faults of a run, drawn from a seed, and the processes that they hit, on this machine and on Ray nodes."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from armature.components.contracts.cluster import ClusterSettings
from armature.components.machine.workers.actor import joined

MARK = "ARMATURE_DRILL"
"""Environment variable that all processes of a run inherit. Its random value is the run's mark. A process without the
mark was not started by the run and never gets a signal."""
KINDS = {
    "run": "armature",
    "server": "vllm.entrypoints.openai.api_server",
    "rank": "armature.components.training.service",
    "rollout worker": "armature.components.rollouts.worker",
    "simulator": "armature.components.robots.libero.worker",
    "actor": "ray::",
}
"""Kinds of processes that are disturbed: the Python module of each, and the beginning of an actor's name on Ray.

A run that loses one of these promises the same weights. Other environments may count the episode as failed."""
CUT, FILL = "connections", "disk"
"""Names of the disturbances that hit no process."""

Process = tuple[str, int]
"""Name of the host, and PID on it."""


def signal_processes(mark: str, kind: str, number: int = 0, only: Process | None = None) -> set[Process]:
    """Send a signal to the processes of this machine that have the mark and are of this kind, and return them.

    Args:
        number: the signal; 0 only finds the processes.
        only: send it to no other process.
    """
    signaled = set()
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            first, *rest = process.cmdline() or [""]
            # A guard's command line has the same words too, but not at its beginning.
            of_kind = rest[:2] == ["-m", KINDS[kind]] or (kind == "actor" and first.startswith(KINDS[kind]))
            name = os.uname().nodename, process.pid
            if of_kind and only in (None, name) and process.environ().get(MARK) == mark:
                process.send_signal(number)
                signaled.add(name)
    return signaled


def signal_everywhere(cluster: ClusterSettings | None, *arguments: Any) -> set[Process]:
    """Do what `signal_processes` does on this machine, and on each node of the run's Ray cluster."""
    signaled = signal_processes(*arguments)
    if cluster is not None:
        ray = joined(cluster.address)
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        for node in ray.nodes():
            place = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
            task = ray.remote(signal_processes).options(num_cpus=0, max_retries=0, scheduling_strategy=place)
            with suppress(ray.exceptions.RayError):  # the node is lost, and its processes with it
                signaled |= ray.get(task.remote(*arguments), timeout=60)
    return signaled


@dataclass(frozen=True)
class Fault:
    """A fault that begins `delay` seconds after the training step `step` is done.

    `action` is "kill" (one process of the kind `victim`), "pause" (all of the kind), "cut" or "fill". All but "kill"
    last for `seconds`.
    """

    action: str
    victim: str
    step: int
    delay: float
    seconds: float

    def __str__(self) -> str:
        lasts = "" if self.action == "kill" else f" for {self.seconds:.1f} s"
        return f"{self.action} {self.victim}, {self.delay:.1f} s after step {self.step}{lasts}"


def choose(rng: random.Random, possible: Sequence[str], steps: int) -> list[Fault]:
    """Return one to three random faults of a run with `steps` steps, in the order of their times.

    `possible` has the kinds of processes that the run has, and `CUT` and `FILL` where they are possible.
    """
    actions = {CUT: ("cut", "cut"), FILL: ("fill",)}
    pairs = [(action, each) for each in possible for action in actions.get(each, ("kill", "pause"))]
    drawn = [rng.choice(pairs) for _ in range(rng.randint(1, 3))]
    faults = [Fault(*each, rng.randrange(steps), rng.uniform(0, 0.6), rng.uniform(1, 8)) for each in drawn]
    return sorted(faults, key=lambda fault: (fault.step, fault.delay))


def can_mount() -> bool:
    return os.geteuid() == 0 and shutil.which("mount") is not None


@contextmanager
def small_disk(folder: Path, size: int) -> Iterator[None]:
    """Make `folder` a disk of `size` bytes while the block runs."""
    folder.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill_disk(file: Path) -> None:
    """Write zeros to a file until its disk has no byte left."""
    for block in (bytes(2**20), b"0"):
        with suppress(OSError), file.open("ab", buffering=0) as opened:
            while opened.write(block):
                pass
