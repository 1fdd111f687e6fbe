"""The processes of a training, started, brought together and ended as one. Torch-free.

They meet in a folder that only we can write to (torch's FileStore): no port is opened for it, and nothing that a
stranger could send is read. Their collectives listen on one network interface, which is loopback on one node.

As a program it is the parent of one node's ranks: `python -m armature.components.training.processes COUNT FIRST
ARGUMENTS...` starts `python ARGUMENTS...` as ranks FIRST, FIRST + 1, ... and ends as soon as one of them fails. The
process guard ends the others.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveFloat, PositiveInt

from armature.components.contracts.machine import Machine
from armature.components.contracts.secrets import Environment, resolve
from armature.components.machine.network import loopback, network
from armature.components.machine.process import Program
from armature.components.machine.resources import VISIBLE, visible_devices

RENDEZVOUS = "ARMATURE_RENDEZVOUS"
"""Variable that names the file in which ranks meet."""
SERVER_SHARE = 0.92
"""vLLM's gpu_memory_utilization (0.26 to 0.32)."""
_POLL = 0.1


class TrainerProcesses(BaseModel):
    """The ranks of a training, and how they find each other."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    processes: PositiveInt = 1
    """Ranks on each node."""
    nodes: PositiveInt = 1
    """They see the same folders under the same names."""
    interface: str | None = None
    """Name or address of the interface to the network that nodes speak over, or NCCL with servers elsewhere; None:
    loopback."""
    gpus: tuple[int, ...] = ()
    """CUDA devices of each node, one per process; empty on CPU."""
    sharding: Literal["full", "hybrid"] | None = None
    """Split the model over all ranks (FSDP2), or over those of a node; None: copy it to each rank."""
    context_parallel: PositiveInt = 1
    """Ranks that share a sequence; they divide all ranks evenly."""
    server_share: float | None = None
    """Part of one of these GPUs that a server of the run takes; None: no server is on them."""
    threads: NonNegativeInt = 0
    """Of torch in each rank; 0 lets it choose."""
    environment: Environment = Field(default_factory=dict)
    """More variables of the ranks."""
    ready_timeout: PositiveFloat = 600.0
    """Seconds that ranks wait for each other to start."""
    rank_timeout: PositiveFloat = 1800.0
    """Seconds that ranks wait for each other in a collective."""

    @classmethod
    def of(cls, machine: Machine) -> TrainerProcesses:
        """Those of `machine`: by default several GPUs share one model, several CPU processes have one each."""
        several = machine.trainer_nodes * machine.trainer_processes > 1
        gpus, bundle = machine.gpus_of_trainer, machine.trainer_bundle
        sharding = machine.trainer_sharding or ("full" if several and gpus else "none")
        return cls(
            processes=machine.trainer_processes,
            nodes=machine.trainer_nodes,
            interface=machine.trainer_interface,
            gpus=gpus,
            sharding=None if sharding == "none" else sharding,
            context_parallel=machine.trainer_context_parallel,
            server_share=_server_share(machine),
            threads=machine.threads or (max(1, bundle.num_cpus // machine.trainer_processes) if bundle else 0),
            environment=machine.trainer_environment,
            ready_timeout=machine.ready_timeout,
            rank_timeout=machine.rank_timeout,
        )

    @property
    def ranks(self) -> int:
        """Those of all nodes."""
        return self.nodes * self.processes

    @property
    def copies(self) -> int:
        """How often all ranks together hold the model."""
        return {"full": 1, "hybrid": self.nodes, None: self.ranks}[self.sharding]

    @property
    def shards(self) -> int:
        """Ranks that one copy is split over."""
        return self.ranks // self.copies

    def start(
        self,
        arguments: Sequence[str | Path],
        *,
        rendezvous: Path,
        node: int = 0,
        log: Path | None,
        env: Mapping[str, str | None] | None = None,
    ) -> Program:
        """Start `python ARGUMENTS...` as the ranks of one node.

        Args:
            rendezvous: a folder as `private_folder` makes it, new for every start, which all nodes see.
            node: which of the nodes this is.
            env: variables beside those of `environment`.

        Raises:
            ConfigurationError: this machine has no such interface, or a variable that `environment` names is not set.
        """
        name = network(self.interface) if self.interface else loopback()
        own = name if self.nodes > 1 else loopback()
        ours: dict[str, str | None] = {
            "WORLD_SIZE": str(self.ranks),
            RENDEZVOUS: str(rendezvous / "store"),
            "GLOO_SOCKET_IFNAME": own,
            "NCCL_SOCKET_IFNAME": f"={name}",
        }
        if self.gpus:
            # A host may be some 4,000 kernels ahead instead of 1,000: a GPU is done with the short ones of a vision
            # tower before the host has launched as many.
            ours["CUDA_SCALE_LAUNCH_QUEUES"] = os.environ.get("CUDA_SCALE_LAUNCH_QUEUES", "4x")
        if self.processes > 1:
            ours["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", "1")
            first = str(node * self.processes)
            command = [sys.executable, "-m", __spec__.name, str(self.processes), first, *arguments]
        else:
            ours |= {"RANK": str(node), "LOCAL_RANK": "0"}
            command = [sys.executable, *arguments]
        ours |= resolve(self.environment, "machine.trainer_environment")
        if self.gpus:
            ours[VISIBLE] = visible_devices(self.gpus)
        if self.threads:
            ours["OMP_NUM_THREADS"] = str(self.threads)
        return Program(command, log=log, env=ours | dict(env or {}))


def _server_share(machine: Machine) -> float | None:
    if machine.started_server_gpus.isdisjoint(machine.trainer_gpus):
        return None
    return float(machine.server_arguments.get("gpu_memory_utilization", SERVER_SHARE))


def error_file(rendezvous: Path, rank: int) -> Path:
    """Where a rank writes what ended it."""
    return rendezvous / f"error-{rank}.json"


def new_attempt(workspace: Path) -> Path:
    """Make the folder in which the ranks of the next start meet; those before the last one are removed.

    Its name was never used before, so ranks of an earlier start that still run on a lost node cannot enter it.
    """
    numbers = sorted(int(each.name.removeprefix("attempt-")) for each in workspace.glob("attempt-*"))
    for number in numbers[:-1]:
        shutil.rmtree(workspace / f"attempt-{number}", ignore_errors=True)
    return private_folder(workspace / f"attempt-{numbers[-1] + 1 if numbers else 1}")


def private_folder(path: Path) -> Path:
    """`path` as an empty folder of ours alone."""
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True, mode=0o700)
    return path


def _main(processes: int, first: int, arguments: Sequence[str]) -> int:
    """The exit code of the first rank that fails, 0 when all are done."""
    ranks = [
        subprocess.Popen(
            [sys.executable, *arguments], env=os.environ | {"RANK": str(first + local), "LOCAL_RANK": str(local)}
        )
        for local in range(processes)
    ]
    while True:
        codes = [rank.poll() for rank in ranks]
        for number, code in enumerate(codes, first):
            if code:
                print(f"rank {number} ended with exit code {code}", file=sys.stderr)
                return code if code > 0 else 128 - code
        if all(code == 0 for code in codes):
            return 0
        time.sleep(_POLL)


if __name__ == "__main__":
    sys.exit(_main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]))
