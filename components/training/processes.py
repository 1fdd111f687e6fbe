"""The rank processes of a training: how they are started, find each other and end together. Torch-free.

Ranks meet through files in a folder that only this user can write to (torch's FileStore). So no port is opened for it,
and nothing is read that a stranger could send. Collectives listen on one network interface, on one node on loopback.

Run as a program, this module is the parent of one node's ranks: `python -m armature.components.training.processes COUNT
FIRST ARGUMENTS...` starts `python ARGUMENTS...` as ranks FIRST, FIRST + 1, ... and exits as soon as one of them fails;
the process guard then ends the others.
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
"""Environment variable with the path of the FileStore through which ranks exchange their addresses."""
SERVER_SHARE = 0.92
"""Default of vLLM's gpu_memory_utilization in vLLM 0.26 to 0.32: the part of a GPU's memory that a server takes."""
_POLL = 0.1


class TrainerProcesses(BaseModel):
    """The number of a training's ranks, their devices, and the way in which they find each other."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    processes: PositiveInt = 1
    """Number of ranks on each node."""
    nodes: PositiveInt = 1
    """Number of nodes. All of them see the same folders under the same paths."""
    interface: str | None = None
    """Name or address of the network interface for collectives between nodes, or for NCCL with servers on other
    machines; None is loopback."""
    gpus: tuple[int, ...] = ()
    """CUDA devices of each node, one per process; empty on CPU."""
    sharding: Literal["full", "hybrid", "experts"] | None = None
    """Shard the model over all ranks (full, FSDP2), over the ranks of each node (hybrid), or over all ranks with whole
    experts on each (experts); None copies it to each rank."""
    context_parallel: PositiveInt = 1
    """Number of ranks that share each sequence; it divides the number of all ranks."""
    server_share: float | None = None
    """Part of the memory of one of these GPUs that a model server of the run takes; None if no server is on them."""
    threads: NonNegativeInt = 0
    """Number of torch threads in each rank; 0 leaves the choice to torch."""
    environment: Environment = Field(default_factory=dict)
    """Further environment variables of the ranks."""
    ready_timeout: PositiveFloat = 600.0
    """Seconds that ranks wait for each other at the start."""
    rank_timeout: PositiveFloat = 1800.0
    """Seconds that ranks wait for each other in a collective."""

    @classmethod
    def of(cls, machine: Machine) -> TrainerProcesses:
        """Return the trainer processes that `machine` describes.

        By default several GPUs shard one model, and several CPU processes have a copy each.
        """
        several = machine.trainer.nodes * machine.trainer.processes > 1
        gpus, bundle = machine.gpus_of_trainer, machine.trainer_bundle
        sharding = machine.trainer.sharding or ("full" if several and gpus else "none")
        return cls(
            processes=machine.trainer.processes,
            nodes=machine.trainer.nodes,
            interface=machine.trainer.interface,
            gpus=gpus,
            sharding=None if sharding == "none" else sharding,
            context_parallel=machine.trainer.context_parallel,
            server_share=_server_share(machine),
            threads=machine.threads or (max(1, bundle.num_cpus // machine.trainer.processes) if bundle else 0),
            environment=machine.trainer.environment,
            ready_timeout=machine.limits.ready_timeout,
            rank_timeout=machine.limits.rank_timeout,
        )

    @property
    def ranks(self) -> int:
        """Number of ranks on all nodes together."""
        return self.nodes * self.processes

    @property
    def copies(self) -> int:
        """Number of copies of the model over all ranks."""
        return {"full": 1, "experts": 1, "hybrid": self.nodes, None: self.ranks}[self.sharding]

    @property
    def shards(self) -> int:
        """Number of ranks over which one copy of the model is sharded."""
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
        """Start the ranks of one node, each as a process `python ARGUMENTS...`.

        Args:
            rendezvous: a folder made by `private_folder`, new for every start and visible to all nodes.
            node: the number of this node, from 0.
            env: environment variables in addition to `environment`.

        Raises:
            ConfigurationError: this machine does not have the interface, or a variable that `environment` refers to is
                not set.
        """
        name = network(self.interface) if self.interface else loopback()
        variables: dict[str, str | None] = {
            "WORLD_SIZE": str(self.ranks),
            RENDEZVOUS: str(rendezvous / "store"),
            "GLOO_SOCKET_IFNAME": name if self.nodes > 1 else loopback(),
            "NCCL_SOCKET_IFNAME": f"={name}",
        }
        if self.gpus:
            # Let the host queue about 4,000 kernels instead of 1,000. A vision tower has so many short kernels that
            # otherwise the GPU would run out of work while the host is still launching them.
            variables["CUDA_SCALE_LAUNCH_QUEUES"] = os.environ.get("CUDA_SCALE_LAUNCH_QUEUES", "4x")
        if self.processes > 1:
            variables["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", "1")
            first = str(node * self.processes)
            command = [sys.executable, "-m", __spec__.name, str(self.processes), first, *arguments]
        else:
            variables |= {"RANK": str(node), "LOCAL_RANK": "0"}
            command = [sys.executable, *arguments]
        variables |= resolve(self.environment, "machine.trainer.environment")
        if self.gpus:
            variables[VISIBLE] = visible_devices(self.gpus)
        if self.threads:
            variables["OMP_NUM_THREADS"] = str(self.threads)
        return Program(command, log=log, env=variables | dict(env or {}))


def _server_share(machine: Machine) -> float | None:
    if machine.started_server_gpus.isdisjoint(machine.trainer.gpus):
        return None
    return float(machine.servers.arguments.get("gpu_memory_utilization", SERVER_SHARE))


def error_file(rendezvous: Path, rank: int) -> Path:
    """Return the path of the file in which a rank describes the error that ended it."""
    return rendezvous / f"error-{rank}.json"


def new_attempt(workspace: Path) -> Path:
    """Make and return the folder `attempt-N`, through which the ranks of the next start will connect.

    Folders of older attempts are removed, except the previous one.

    The name of the new folder was never used before, so ranks of an earlier start that still run on a lost node cannot
    join.
    """
    numbers = sorted(int(each.name.removeprefix("attempt-")) for each in workspace.glob("attempt-*"))
    for number in numbers[:-1]:
        shutil.rmtree(workspace / f"attempt-{number}", ignore_errors=True)
    return private_folder(workspace / f"attempt-{numbers[-1] + 1 if numbers else 1}")


def private_folder(path: Path) -> Path:
    """Make `path` an empty folder that only this user can enter, and return it."""
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True, mode=0o700)
    return path


def _main(processes: int, first: int, arguments: Sequence[str]) -> int:
    """Start `processes` ranks on this node, numbered from `first`, and wait until they end.

    Return the exit code of the first rank that fails, or 0.
    """
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
