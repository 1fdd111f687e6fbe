"""Settings of the machine on which a run takes place. They do not change results, so they are not hashed."""

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

_QUOTA = Path("/sys/fs/cgroup/cpu.max")
"""File with the CPU limit of this process's container: microseconds of CPU time per period, and the period."""


def available_cpus(quota: Path = _QUOTA) -> int:
    """Return the number of CPUs that this process may use, at least 1.

    SLURM, taskset, or a container's limit (cgroup v2) may leave fewer than the machine has.
    """
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        limit, period = quota.read_text().split()
    except (OSError, ValueError):
        return allowed
    return allowed if limit == "max" else max(1, min(allowed, int(limit) // int(period)))


Scalar = bool | int | float | str
"""Type of the value of a vLLM argument."""
ADDRESS = r"^(\[[0-9a-fA-F:]+\]|[^\s:/\[\]]+):[0-9]{1,5}$"
"""Pattern of an address HOST:PORT."""
BASE_URL = r"https?://[^\s/?#@]+(/[^\s?#]*)?"
"""Pattern of the base URL of a server's API, to be matched as a whole."""


class MachineServers(Settings):
    """The vLLM servers that generate: those that a run starts, or running ones that it joins."""

    model_config = ConfigDict(title="Model servers")
    count: PositiveInt = 1
    """vLLM servers to start when no endpoints are given."""
    endpoints: Annotated[tuple[str, ...], BeforeValidator(refuse_plain_url)] = ()
    """Base URLs of running vLLM servers to join instead."""
    gpus: tuple[tuple[NonNegativeInt, ...], ...] = ()
    """CUDA devices of each local server, e.g. [[0, 1], [2, 3]], counted from 0 among the devices that
    CUDA_VISIBLE_DEVICES lists; empty on CPU."""
    python: Path | None = None
    """Python interpreter of an environment with vLLM. None: the interpreter of .venv-vllm in this folder, or else of
    the environment that `armature setup` created."""
    arguments: Annotated[dict[str, Scalar], BeforeValidator(refuse_plain_arguments)] = Field({})
    """More vLLM arguments, e.g. {gpu_memory_utilization = 0.8}."""
    environment: Environment = Field({})
    """More environment variables for vLLM, e.g. {NCCL_DEBUG = 'INFO', HF_TOKEN = {env = 'HF_TOKEN'}}."""
    weight_transfer: Literal["file", "delta", "nccl", "ipc"] = "file"
    """Transport of new weights to the servers. file: a checkpoint folder. delta: a file with the changes since the
    last version, whose weights servers keep in main memory. nccl and ipc: directly between GPUs."""
    sync_tolerance: PositiveFloat | None = None
    """Largest root mean square difference, in nats, between a server's and the trainer's log-probs of a fixed prompt
    after new weights were loaded. Default: 1e-4 if both compute in float32 on CPU, 1e-2 in float32 on a GPU or a joined
    server, 0.1 in 16 bits, 0.5 if servers compute in 8 bits."""

    @model_validator(mode="after")
    def _endpoints_are_distinct_urls(self) -> Self:
        seen = set[str]()
        for url in self.endpoints:
            if not re.fullmatch(BASE_URL, url):
                raise ValueError(f"{url!r} in endpoints is not the base URL of a server, such as http://10.0.0.7:8000")
            if (name := url.rstrip("/")) in seen:
                raise ValueError(f"{name!r} is in endpoints twice")
            seen.add(name)
        return self


class MachineTrainer(Settings):
    """The processes that train, and the devices and the network that they use."""

    model_config = ConfigDict(title="Trainer processes")
    processes: PositiveInt = 1
    """Ranks of the trainer on each node."""
    nodes: PositiveInt = 1
    """Nodes of the cluster that train; more than one needs cluster.trainer."""
    gpus: tuple[NonNegativeInt, ...] = ()
    """CUDA devices of the trainer on each node, counted as in servers.gpus; empty on CPU."""
    sharding: Literal["full", "hybrid", "experts", "none"] | None = None
    """Sharding of the model over the trainer's ranks with FSDP2. full: over all ranks. hybrid (HSDP): over the ranks of
    a node, with a copy on each node. experts: full, but each rank keeps some experts of every layer of a mixture of
    experts, and computes them for the tokens of all ranks (expert parallelism). none: each rank has the whole model.
    Unset: full on several GPUs, none on CPU."""
    context_parallel: PositiveInt = 1
    """Number of ranks that compute one sequence together, each a part of its tokens, for sequences that do not fit on
    one GPU. Needs trainer.packing, and has to divide the model's number of attention heads."""
    interface: str | None = Field(None, pattern=r"^[^\s=,^]+$")
    """Network interface (eth1), or this machine's address on it. Ranks on several nodes use it, and so do the trainer
    and servers on other machines with nccl. The network must be private: anyone who can reach it can disturb the
    training. None: loopback only; with cluster.trainer, the network of Ray."""
    environment: Environment = Field({})
    """More environment variables for the trainer, as for the servers."""
    loader_workers: int = Field(1, ge=0)
    """Processes that decode images and build micro-batches."""

    @model_validator(mode="after")
    def _ranks_fit(self) -> Self:
        ranks = self.nodes * self.processes
        if self.sharding and ranks == 1:
            raise ValueError("sharding has no effect with one rank of the trainer")
        if self.sharding == "hybrid" and self.nodes == 1:
            raise ValueError('sharding = "hybrid" has a copy on each node: with nodes = 1 it is "full"')
        if ranks % self.context_parallel:
            raise ValueError(
                f"context_parallel = {self.context_parallel} does not divide the {ranks} ranks of the trainer "
                "(processes on each node)"
            )
        return self


class MachineWorkers(Settings):
    """Worker processes beside the trainer and the servers, on the cluster if there is one."""

    model_config = ConfigDict(title="Worker processes")
    environments: int = Field(0, ge=0)
    """Processes that play episodes, for environments that run in processes of their own; 0: half of the cores."""
    rollouts: int = Field(0, ge=0)
    """Worker processes that collect the rollouts of train-vlm. Each plays whole groups and sends requests to the
    servers itself. 0: the run's own process collects the rollouts."""
    statistics: int = Field(0, ge=0)
    """Worker processes that compute statistics of datasets; 0: threads of this process."""


class MachineLimits(Settings):
    """Time limits in seconds, and the limit on concurrent requests."""

    model_config = ConfigDict(title="Machine limits")
    max_concurrent: PositiveInt = 128
    """Concurrent requests over the whole pool."""
    ready_timeout: PositiveFloat = 600.0
    """Seconds until a server or the trainer must be ready."""
    lease_timeout: float = Field(0.0, ge=0)
    """Seconds to wait for a server that another run holds; 0: fail at once."""
    generation_timeout: PositiveFloat = 600.0
    """Seconds for one generation request."""
    environment_timeout: PositiveFloat = 120.0
    """Seconds for one reset, step or close of an environment."""
    train_timeout: PositiveFloat = 3600.0
    """Seconds for one training step."""
    sync_timeout: PositiveFloat = 300.0
    """Seconds for new weights to reach every server."""
    node_timeout: float = Field(60.0, ge=4)
    """Seconds without a sign of life after which the node of the trainer's first rank counts as lost."""
    rank_timeout: float = Field(1800.0, ge=1)
    """Seconds that ranks of the trainer wait for each other in a collective, before one counts as hung."""
    rollout_straggler_timeout: PositiveFloat | None = None
    """Seconds that training waits for the shard of a rollout worker, when it has nothing else to do, before a free
    worker plays the shard instead. None: wait as long as the worker takes."""


def _several(names: object) -> object:
    """Return a string as a tuple of one name, and a value of another type unchanged."""
    return (names,) if isinstance(names, str) else names


class Machine(Settings):
    """Folders, servers, trainer processes, workers and limits of the machine that a run uses.

    Example:
        >>> machine = Machine(servers=MachineServers(count=2), trainer=MachineTrainer(processes=2, gpus=(0, 1)))
        >>> machine.servers.count, machine.gpus_of_trainer
        (2, (0, 1))
    """

    model_config = ConfigDict(title="Machine")
    store: str = ".armature/store"
    """Folder of the artifact store."""
    remote_store: Annotated[str | None, BeforeValidator(refuse_plain_url)] = None
    """fsspec URL (s3://bucket/prefix) of a remote store, to which artifacts, their images and checkpoints are copied
    and from which a run fetches them."""
    force: tuple[str, ...] = ()
    """Stages to run again although their results exist, together with all stages that depend on them."""
    skip_batches: tuple[PositiveInt, ...] = ()
    """Steps of an RL run that skip the update, for a batch that cannot be trained on. The run remembers these steps and
    records them in its history and lineage."""
    threads: int = Field(0, ge=0)
    """CPU threads of each trainer rank and server; 0 lets torch choose."""
    metrics: str | None = Field(None, pattern=ADDRESS)
    """Address (127.0.0.1:9464) where a run serves its metrics to Prometheus; port 0 takes a free port. None: metrics
    are not served. There is no password: anyone who can reach the address can read the metrics."""
    report_to: Annotated[tuple[Literal["tensorboard", "trackio", "wandb"], ...], BeforeValidator(_several)] = ()
    """Trackers, or one by its name, that get metrics, settings and some rollouts of each stage, besides MLflow."""
    servers: MachineServers = MachineServers()
    """vLLM servers: how many, their devices and arguments, or the addresses of running ones."""
    trainer: MachineTrainer = MachineTrainer()
    """Processes that train: how many, their devices, and how they split the model."""
    workers: MachineWorkers = MachineWorkers()
    """Worker processes that play episodes, collect rollouts and compute statistics."""
    limits: MachineLimits = MachineLimits()
    """Time limits, and the limit on concurrent requests."""
    cluster: ClusterSettings | None = None
    """The Ray cluster that runs the workers in place of this machine. It also runs the vLLM servers if `servers` is
    set, and the trainer's ranks if `trainer` is set."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.limits.rollout_straggler_timeout and self.workers.rollouts < 2:
            raise ValueError("limits.rollout_straggler_timeout has no effect with less than two workers.rollouts")
        if self.trainer.nodes > 1 and not self.trainer_bundle:
            raise ValueError(
                f"trainer.nodes = {self.trainer.nodes} needs a Ray cluster and what the ranks take of each node: "
                'cluster = {address = "auto", trainer = {num_cpus = 8, num_gpus = 8}}'
            )
        self._refuse_cluster()
        return self

    def _refuse_cluster(self) -> None:
        """Raise ValueError if `cluster` is set without anything to run on it, or contradicts other settings."""
        if self.cluster is None:
            return
        bundle, trainer, transfer = self.server_bundle, self.trainer_bundle, self.servers.weight_transfer
        workers = self.workers.environments or self.workers.statistics or self.workers.rollouts
        if not (workers or bundle or trainer):
            raise ValueError(
                "cluster needs workers.environments, workers.rollouts or workers.statistics, how many it is to have, "
                "or cluster.servers, or cluster.trainer"
            )
        if self.workers.rollouts and not self.joins_servers and not bundle:
            raise ValueError(
                "workers.rollouts on a cluster ask the servers themselves, which listen on loopback where a run starts "
                "them: name servers that all nodes reach in servers.endpoints, or start them there with cluster.servers"
            )
        if bundle and self.joins_servers:
            raise ValueError("cluster.servers is of servers that a run starts: leave it out, or servers.endpoints")
        if bundle and self.servers.gpus:
            raise ValueError(
                "servers.gpus names GPUs of this machine, and cluster.servers puts the servers on others: set "
                "servers.gpus = [], and cluster.servers.tensor_parallel_size"
            )
        if bundle and not self.sends_folders:
            raise ValueError(f'cluster.servers needs servers.weight_transfer = "file" or "delta", not {transfer}')
        if trainer and self.trainer.gpus:
            raise ValueError(
                "trainer.gpus names GPUs of this machine, and cluster.trainer puts the ranks on others: set "
                "trainer.gpus = [], and cluster.trainer.num_gpus"
            )
        if trainer and trainer.num_gpus not in (0, self.trainer.processes):
            raise ValueError(
                f"cluster.trainer.num_gpus = {trainer.num_gpus}: each of the {self.trainer.processes} ranks of a node "
                "(trainer.processes) has one GPU, or none has"
            )
        if trainer and not self.sends_folders:
            raise ValueError(f'cluster.trainer needs servers.weight_transfer = "file" or "delta", not {transfer}')

    @property
    def server_threads(self) -> int:
        """Number of CPU threads of each server: `threads`, or half of the cores, divided among the servers.

        The HTTP front end, the environments and the trainer need the other half. With a tiny model on two cores, one
        thread has ten times the throughput of two, which wait for each other.
        """
        cores = self.server_bundle.num_cpus if self.server_bundle else available_cpus() // (2 * self.servers.count)
        return self.threads or max(1, cores)

    @property
    def server_interpreter(self) -> Path:
        """The interpreter that runs vLLM: `servers.python`, or the default one."""
        return self.servers.python or server_python()

    def server_variables(self) -> dict[str, str]:
        """Return `servers.environment` with resolved secrets. Raises ConfigurationError if a secret is not set."""
        return resolve(self.servers.environment, "machine.servers.environment")

    def trainer_variables(self) -> dict[str, str]:
        """Return `trainer.environment` with resolved secrets. Raises ConfigurationError if a secret is not set."""
        return resolve(self.trainer.environment, "machine.trainer.environment")

    @property
    def sends_folders(self) -> bool:
        """True if each server reads new weights from a folder on disk."""
        return self.servers.weight_transfer in ("file", "delta")

    @property
    def joins_servers(self) -> bool:
        """True if the run uses servers that are already running and starts none."""
        return bool(self.servers.endpoints)

    @property
    def server_bundle(self) -> ServerBundle | None:
        """Resources that a server takes of its cluster node. None: servers are started on this machine."""
        return self.cluster.servers if self.cluster else None

    @property
    def trainer_bundle(self) -> TrainerBundle | None:
        """Resources that the trainer takes of each cluster node. None: the trainer runs on this machine."""
        return self.cluster.trainer if self.cluster else None

    @property
    def gpus_of_trainer(self) -> tuple[int, ...]:
        """Numbers of the CUDA devices that the trainer uses on each node. On a cluster, the GPUs that Ray reserved
        for the trainer are counted from 0."""
        return tuple(range(self.trainer_bundle.num_gpus)) if self.trainer_bundle else self.trainer.gpus

    def gpus_of_server(self, index: int) -> tuple[int, ...]:
        """Return the numbers of the CUDA devices that server `index` uses. On a cluster, the GPUs that Ray reserved for
        the server are counted from 0."""
        if self.server_bundle is not None:
            return tuple(range(self.server_bundle.tensor_parallel_size))
        return self.servers.gpus[index] if index < len(self.servers.gpus) else ()

    @property
    def started_server_gpus(self) -> frozenset[int]:
        """Numbers of the CUDA devices of all servers that the run starts; empty if it joins running servers."""
        return frozenset() if self.joins_servers else frozenset(device for each in self.servers.gpus for device in each)

    @property
    def playing_processes(self) -> int:
        """Number of environment processes: `workers.environments`, or half of the CPUs that this process may use."""
        return self.workers.environments or max(1, available_cpus() // 2)
