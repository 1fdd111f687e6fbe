"""Facts of the machine a run is on. None of them changes results, so none of them is hashed."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, ConfigDict, Field, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from armature.components.contracts.cluster import ClusterSettings, ServerBundle, TrainerBundle
from armature.components.contracts.installation import server_python
from armature.components.contracts.secrets import Environment, refuse_plain_arguments, refuse_plain_url, resolve
from armature.components.contracts.settings import Settings

# The CPUs that this process may use.

_QUOTA = Path("/sys/fs/cgroup/cpu.max")


def available_cpus(quota: Path = _QUOTA) -> int:
    """At least one; fewer than the machine has under SLURM, in a container with a limit (cgroup v2), or by taskset."""
    own = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        limit, period = quota.read_text().split()
    except (OSError, ValueError):
        return own
    return own if limit == "max" else max(1, min(own, int(limit) // int(period)))


Scalar = bool | int | float | str
ADDRESS = r"^(\[[0-9a-fA-F:]+\]|[^\s:/\[\]]+):[0-9]{1,5}$"
"""host:port"""
BASE_URL = r"https?://[^\s/?#@]+(/[^\s?#]*)?"
"""Of a server's API, as a whole."""


class Machine(Settings):
    """Where artifacts lie, which servers generate, which devices train, and how long to wait for each."""

    model_config = ConfigDict(title="Machine")
    store: str = ".armature/store"
    """Folder of the artifact store."""
    remote_store: Annotated[str | None, BeforeValidator(refuse_plain_url)] = None
    """fsspec URL (s3://bucket/prefix) that artifacts, their images and checkpoints are copied to and found in."""
    force: tuple[str, ...] = ()
    """Stages that are made again, with all that depends on them, though they were made before."""
    servers: PositiveInt = 1
    """vLLM servers to start when no endpoints are given."""
    endpoints: Annotated[tuple[str, ...], BeforeValidator(refuse_plain_url)] = ()
    """Base URLs of running vLLM servers to join instead."""
    weight_transfer: Literal["file", "delta", "nccl", "ipc"] = "file"
    """How new weights reach the servers: as a checkpoint's folder (file), as what changed since the last one, which
    servers keep in main memory (delta), or between GPUs (nccl, ipc)."""
    server_python: Path | None = None
    """Interpreter that has vLLM. None: that of .venv-vllm in this folder, else of `armature setup`."""
    server_gpus: tuple[tuple[NonNegativeInt, ...], ...] = ()
    """CUDA devices of each local server, e.g. [[0, 1], [2, 3]], counted from 0 among those that CUDA_VISIBLE_DEVICES
    leaves; empty on CPU."""
    server_arguments: Annotated[dict[str, Scalar], BeforeValidator(refuse_plain_arguments)] = Field({})
    """More vLLM arguments, e.g. {gpu_memory_utilization = 0.8}."""
    server_environment: Environment = Field({})
    """More environment variables for vLLM, e.g. {NCCL_DEBUG = 'INFO', HF_TOKEN = {env = 'HF_TOKEN'}}."""
    trainer_processes: PositiveInt = 1
    """Ranks of the trainer on each node."""
    trainer_gpus: tuple[NonNegativeInt, ...] = ()
    """CUDA devices of the trainer on each node, counted as in server_gpus; empty on CPU."""
    trainer_nodes: PositiveInt = 1
    """Nodes of the cluster that train; more than one needs cluster.trainer."""
    trainer_sharding: Literal["full", "hybrid", "none"] | None = None
    """How the trainer's ranks split the model with FSDP2: full, over all of them; hybrid (HSDP), over those of a node,
    with a copy on each node; none: each rank has the whole model. None: full on several GPUs, none on CPU."""
    trainer_context_parallel: PositiveInt = 1
    """Ranks that compute one sequence together, each a part of its tokens: for sequences that one GPU does not hold.
    Needs trainer.packing, and a model whose attention heads it divides."""
    trainer_interface: str | None = Field(None, pattern=r"^[^\s=,^]+$")
    """Network interface (eth1), or this machine's address on it, that ranks of several nodes, or trainer and distant
    servers with nccl, speak over. Private: whoever reaches it can disturb a training. None: loopback only; with
    cluster.trainer the network of Ray."""
    trainer_environment: Environment = Field({})
    """More environment variables for the trainer, as for the servers."""
    threads: int = Field(0, ge=0)
    """CPU threads of each trainer rank and server; 0 lets torch choose."""
    loader_workers: int = Field(1, ge=0)
    """Processes that decode images and build micro-batches."""
    environment_processes: int = Field(0, ge=0)
    """Processes that play episodes of environments that need some; 0: half of the cores."""
    rollout_workers: int = Field(0, ge=0)
    """Worker processes, on the cluster if there is one, that collect the rollouts of train-vlm: each plays whole groups
    and asks the servers itself. 0: the run's own process does."""
    rollout_straggler_timeout: PositiveFloat | None = None
    """Seconds that training waits for a shard of a rollout worker, with nothing else to do, until it is taken from it
    and played by a worker that is free. None: as long as the worker takes."""
    cluster: ClusterSettings | None = None
    """The Ray cluster that has those processes, those of statistics, with its `servers` the vLLM servers and with its
    `trainer` the trainer's ranks, in place of this machine."""
    statistics_workers: int = Field(0, ge=0)
    """Worker processes that compute statistics of datasets, on the cluster if there is one; 0: threads of this
    process."""
    skip_batches: tuple[PositiveInt, ...] = ()
    """Steps of an RL run to make without an update, for a batch that cannot be trained on; the run remembers them, and
    history and lineage say so."""
    lease_timeout: float = Field(0.0, ge=0)
    """Seconds to wait for a server that another run has; 0 refuses at once."""
    max_concurrent: PositiveInt = 128
    """Concurrent requests over the whole pool."""
    ready_timeout: PositiveFloat = 600.0
    """Seconds for a server or the trainer to come up."""
    generation_timeout: PositiveFloat = 600.0
    """Seconds for one generation request."""
    environment_timeout: PositiveFloat = 120.0
    """Seconds for one reset, step or close of an environment."""
    sync_timeout: PositiveFloat = 300.0
    """Seconds for new weights to reach every server."""
    sync_tolerance: PositiveFloat | None = None
    """Largest root mean square difference, in nats, of a server's log-probs of a probe from the trainer's after a sync;
    by default 1e-4 where both compute in float32 on CPU, 5e-3 in float32 on a GPU or a joined server, 0.1 with 16 bits,
    0.5 with servers in 8."""
    node_timeout: float = Field(60.0, ge=4)
    """Seconds without a sign of life from the node of the trainer's first rank until it is lost."""
    rank_timeout: float = Field(1800.0, ge=1)
    """Seconds that ranks of the trainer wait for each other in a collective, before one counts as hung."""
    train_timeout: PositiveFloat = 3600.0
    """Seconds for one training step."""
    metrics: str | None = Field(None, pattern=ADDRESS)
    """Address (127.0.0.1:9464) where a run shows its numbers to Prometheus; port 0 takes a free one. None: nothing
    listens. It asks for no password: whoever reaches it can read them."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        self._refuse_endpoints()
        if self.rollout_straggler_timeout and self.rollout_workers < 2:
            raise ValueError("rollout_straggler_timeout has no effect without another of the rollout_workers")
        if self.trainer_nodes > 1 and not self.trainer_bundle:
            raise ValueError(
                f"trainer_nodes = {self.trainer_nodes} needs a Ray cluster and what the ranks take of each node: "
                'cluster = {address = "auto", trainer = {num_cpus = 8, num_gpus = 8}}'
            )
        if self.trainer_sharding and self.trainer_nodes * self.trainer_processes == 1:
            raise ValueError("trainer_sharding has no effect with one rank of the trainer")
        if self.trainer_sharding == "hybrid" and self.trainer_nodes == 1:
            raise ValueError('trainer_sharding = "hybrid" has a copy on each node: with trainer_nodes = 1 it is "full"')
        if (self.trainer_nodes * self.trainer_processes) % self.trainer_context_parallel:
            raise ValueError(
                f"trainer_context_parallel = {self.trainer_context_parallel} does not divide the "
                f"{self.trainer_nodes * self.trainer_processes} ranks of the trainer (trainer_processes on each node)"
            )
        self._refuse_cluster()
        return self

    def _refuse_cluster(self) -> None:
        """Raises ValueError where `cluster` has nothing, or has what cannot be together."""
        if self.cluster is None:
            return
        bundle, trainer = self.server_bundle, self.trainer_bundle
        workers = self.environment_processes or self.statistics_workers or self.rollout_workers
        if not (workers or bundle or trainer):
            raise ValueError(
                "cluster needs environment_processes, rollout_workers or statistics_workers, how many it is to have, "
                "or cluster.servers, or cluster.trainer"
            )
        if self.rollout_workers and not self.joins_servers and not bundle:
            raise ValueError(
                "rollout_workers on a cluster ask the servers themselves, which listen on loopback where a run starts "
                "them: name servers that all nodes reach in endpoints, or start them there with cluster.servers"
            )
        if bundle and self.joins_servers:
            raise ValueError("cluster.servers is of servers that a run starts: leave it out, or the endpoints")
        if bundle and self.server_gpus:
            raise ValueError(
                "server_gpus names GPUs of this machine, and cluster.servers puts the servers on others: set "
                "server_gpus = [], and cluster.servers.tensor_parallel_size"
            )
        if bundle and not self.sends_folders:
            raise ValueError(f'cluster.servers needs weight_transfer = "file" or "delta", not {self.weight_transfer}')
        if trainer and self.trainer_gpus:
            raise ValueError(
                "trainer_gpus names GPUs of this machine, and cluster.trainer puts the ranks on others: set "
                "trainer_gpus = [], and cluster.trainer.num_gpus"
            )
        if trainer and trainer.num_gpus not in (0, self.trainer_processes):
            raise ValueError(
                f"cluster.trainer.num_gpus = {trainer.num_gpus}: each of the {self.trainer_processes} ranks of a node "
                "(trainer_processes) has one GPU, or none has"
            )
        if trainer and not self.sends_folders:
            raise ValueError(f'cluster.trainer needs weight_transfer = "file" or "delta", not {self.weight_transfer}')

    def _refuse_endpoints(self) -> None:
        """Raises ValueError where `endpoints` has what is not a base URL, or one twice, which would be two servers."""
        seen = set[str]()
        for url in self.endpoints:
            if not re.fullmatch(BASE_URL, url):
                raise ValueError(f"{url!r} in endpoints is not the base URL of a server, such as http://10.0.0.7:8000")
            if (name := url.rstrip("/")) in seen:
                raise ValueError(f"{name!r} is in endpoints twice")
            seen.add(name)

    @property
    def server_interpreter(self) -> Path:
        """`server_python`, or the one that is found."""
        return self.server_python or server_python()

    def server_variables(self) -> dict[str, str]:
        """`server_environment` with its secrets. Raises ConfigurationError if one is not set."""
        return resolve(self.server_environment, "machine.server_environment")

    def trainer_variables(self) -> dict[str, str]:
        """`trainer_environment` with its secrets. Raises ConfigurationError if one is not set."""
        return resolve(self.trainer_environment, "machine.trainer_environment")

    @property
    def sends_folders(self) -> bool:
        """Whether new weights reach the servers through a disk, each server for itself."""
        return self.weight_transfer in ("file", "delta")

    @property
    def joins_servers(self) -> bool:
        """Whether a run asks servers that run already, and starts none."""
        return bool(self.endpoints)

    @property
    def server_bundle(self) -> ServerBundle | None:
        """What a server takes of its node of the cluster; None: servers that a run starts are on this machine."""
        return self.cluster.servers if self.cluster else None

    @property
    def trainer_bundle(self) -> TrainerBundle | None:
        """What the trainer takes of each node of the cluster; None: it is on this machine."""
        return self.cluster.trainer if self.cluster else None

    @property
    def gpus_of_trainer(self) -> tuple[int, ...]:
        """The CUDA devices of the trainer on each node; on a cluster, those of its bundle, counted from 0."""
        return tuple(range(self.trainer_bundle.num_gpus)) if self.trainer_bundle else self.trainer_gpus

    def gpus_of_server(self, index: int) -> tuple[int, ...]:
        """The CUDA devices of a server that the run starts; on a cluster, those of its bundle, counted from 0."""
        if self.server_bundle is not None:
            return tuple(range(self.server_bundle.tensor_parallel_size))
        return self.server_gpus[index] if index < len(self.server_gpus) else ()

    @property
    def started_server_gpus(self) -> frozenset[int]:
        """CUDA devices of the servers that a run starts; none of those that it joins."""
        return frozenset() if self.joins_servers else frozenset(device for each in self.server_gpus for device in each)

    @property
    def playing_processes(self) -> int:
        """`environment_processes`, or half of the CPUs that this process may use."""
        return self.environment_processes or max(1, available_cpus() // 2)
