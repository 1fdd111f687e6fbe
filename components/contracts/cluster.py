"""Settings of a Ray cluster that runs workers, model servers or the trainer in place of this machine."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from armature.components.contracts.settings import Settings

LEAST_AMOUNT = 1e-4
"""Unit in which Ray counts resources, and so the smallest amount that can be reserved."""


def _countable(amount: float) -> float:
    """Refuse an amount of a resource that is positive but too small for Ray."""
    if 0 < amount < LEAST_AMOUNT:
        raise ValueError(f"{amount:g} is less than {LEAST_AMOUNT:g}, in which Ray counts resources")
    return amount


def _whole_or_shared(gpus: float) -> float:
    """Refuse a number of GPUs such as 1.5: Ray reserves a fraction of one GPU or a whole number of GPUs."""
    if gpus > 1 and not gpus.is_integer():
        raise ValueError(f"{gpus:g} GPUs: give a part of one, or whole ones")
    return gpus


def _named_by_nodes(resources: dict[str, float]) -> dict[str, float]:
    """Refuse names of resources that Ray counts by itself, such as CPU: they have settings of their own."""
    for name in ("", "CPU", "GPU", "memory", "object_store_memory"):
        if name in resources:
            raise ValueError(
                f"{name!r} is not a name that `ray start --resources` gives; CPUs, GPUs and memory have settings of "
                "their own"
            )
    return resources


Resources = Annotated[dict[str, Annotated[PositiveFloat, AfterValidator(_countable)]], AfterValidator(_named_by_nodes)]


class Bundle(Settings):
    """Resources of one bundle of a Ray placement group. A bundle runs one model server, or a node's trainer ranks."""

    WHAT: ClassVar[str]
    """Name, in messages, of the process that takes these resources, e.g. "a model server"."""
    SETTING: ClassVar[str]
    """Dotted key of the recipe section with these settings, which error messages name."""

    num_cpus: PositiveInt = 4
    """CPUs of the node."""
    memory_gib: NonNegativeFloat = 0.0
    """GiB of the node's memory; 0: memory is not reserved."""
    resources: Resources = Field({})
    """Other resources, by the names that `ray start --resources` gave: {fast = 1}."""
    strategy: Literal["SPREAD", "PACK", "STRICT_SPREAD", "STRICT_PACK"] = "SPREAD"
    """Placement strategy of Ray: SPREAD over the nodes, or PACK on as few nodes as possible. With the prefix STRICT_,
    the run fails if this is not possible."""

    @property
    def gpus(self) -> int:
        """Number of GPUs that the bundle takes of its node."""
        raise NotImplementedError

    def options(self) -> dict[str, Any]:
        """Return the options with which Ray starts the actor that runs in the bundle."""
        return {
            "num_cpus": self.num_cpus,
            "num_gpus": self.gpus,
            "memory": int(self.memory_gib * 2**30) or None,
            "resources": self.resources,
        }

    def resources_of_node(self) -> dict[str, float]:
        """Return the amount of each resource that the bundle reserves on its node, by Ray's name of the resource."""
        wanted = {"CPU": self.num_cpus, "GPU": self.gpus, "memory": int(self.memory_gib * 2**30)}
        return {name: amount for name, amount in {**wanted, **self.resources}.items() if amount}


class ServerBundle(Bundle):
    """The resources that each model server takes of its node."""

    WHAT = "a model server"
    SETTING = "machine.cluster.servers"

    tensor_parallel_size: NonNegativeInt = 0
    """GPUs that each server takes on its node; vLLM splits the model over these GPUs. 0: the server runs on CPU."""

    @property
    def gpus(self) -> int:
        return self.tensor_parallel_size


class TrainerBundle(Bundle):
    """The resources that all trainer ranks of a node (`machine.trainer.processes`) take together."""

    WHAT = "the trainer's ranks"
    SETTING = "machine.cluster.trainer"

    num_gpus: NonNegativeInt = 0
    """GPUs that the trainer takes on each node, one for each rank; 0: the ranks run on CPU."""

    @property
    def gpus(self) -> int:
        return self.num_gpus


class ClusterSettings(Settings):
    """A running Ray cluster, and the resources that each worker, server or group of ranks takes."""

    address: str = Field(pattern=r"^(auto|(ray://)?(\[[0-9a-fA-F:]+\]|[^\s:/@\[\]]+):[0-9]{1,5})$")
    """HOST:PORT of the cluster's head, ray://HOST:PORT from outside of it, or auto on one of its nodes."""
    num_cpus: Annotated[NonNegativeFloat, AfterValidator(_countable)] = 1.0
    """CPUs that a worker takes of its node."""
    num_gpus: Annotated[NonNegativeFloat, AfterValidator(_countable), AfterValidator(_whole_or_shared)] = 0.0
    """GPUs that a worker takes of its node, for rendering."""
    memory_gib: NonNegativeFloat = 0.0
    """GiB of memory that a worker takes of its node; 0: memory is not reserved."""
    resources: Resources = Field({})
    """Other resources that a worker takes, by the names that `ray start --resources` gave: {simulator = 1}."""
    start_timeout: PositiveFloat = 600.0
    """Seconds to wait until nodes have room for a worker, a server or the trainer; the cluster may have to grow
    first."""
    servers: ServerBundle | None = None
    """Resources of each model server. None: servers run on the machine of the run."""
    trainer: TrainerBundle | None = None
    """Resources of the trainer's ranks on each of machine.trainer.nodes. None: ranks run on the machine of the run."""

    def options(self) -> dict[str, Any]:
        """Return the options with which Ray starts the actor of a worker."""
        return {
            "num_cpus": self.num_cpus,
            "num_gpus": self.num_gpus,
            "memory": int(self.memory_gib * 2**30) or None,
            "resources": self.resources,
            "scheduling_strategy": "SPREAD",
        }

    def resources_of_node(self) -> dict[str, float]:
        """Return the amount of each resource that a worker reserves on its node, by Ray's name of the resource."""
        wanted = {"CPU": self.num_cpus, "GPU": self.num_gpus, "memory": int(self.memory_gib * 2**30)}
        return {name: amount for name, amount in {**wanted, **self.resources}.items() if amount}
