"""Where workers, of environments and of statistics, model servers and the trainer are, if not on this machine."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from armature.components.contracts.settings import Settings

LEAST_AMOUNT = 1e-4
"""In which Ray counts resources."""


def _countable(amount: float) -> float:
    if 0 < amount < LEAST_AMOUNT:
        raise ValueError(f"{amount:g} is less than {LEAST_AMOUNT:g}, in which Ray counts resources")
    return amount


def _whole_or_shared(gpus: float) -> float:
    if gpus > 1 and not gpus.is_integer():
        raise ValueError(f"{gpus:g} GPUs: give a part of one, or whole ones")
    return gpus


def _named_by_nodes(resources: dict[str, float]) -> dict[str, float]:
    for name in ("", "CPU", "GPU", "memory", "object_store_memory"):
        if name in resources:
            raise ValueError(
                f"{name!r} is not a name that `ray start --resources` gives; CPUs, GPUs and memory have settings of "
                "their own"
            )
    return resources


Resources = Annotated[dict[str, Annotated[PositiveFloat, AfterValidator(_countable)]], AfterValidator(_named_by_nodes)]


class Bundle(Settings):
    """What each takes of its node, as a bundle of a placement group."""

    WHAT: ClassVar[str]
    """What it is, for messages."""
    SETTING: ClassVar[str]

    num_cpus: PositiveInt = 4
    """CPUs that each takes of its node."""
    memory_gib: NonNegativeFloat = 0.0
    """GiB of memory that each takes of its node; 0: it is not counted."""
    resources: Resources = Field({})
    """What else each takes, by the names that `ray start --resources` gave: {fast = 1}."""
    strategy: Literal["SPREAD", "PACK", "STRICT_SPREAD", "STRICT_PACK"] = "SPREAD"
    """How Ray places them: SPREAD over the nodes, PACK on as few as there is room on; with STRICT_ in no other way."""

    @property
    def gpus(self) -> int:
        """Of one node."""
        raise NotImplementedError

    def options(self) -> dict[str, Any]:
        """What Ray is told of the actor in the bundle."""
        return {
            "num_cpus": self.num_cpus,
            "num_gpus": self.gpus,
            "memory": int(self.memory_gib * 2**30) or None,
            "resources": self.resources,
        }

    def resources_of_node(self) -> dict[str, float]:
        """The same, as resources of Ray by name."""
        wanted = {"CPU": self.num_cpus, "GPU": self.gpus, "memory": int(self.memory_gib * 2**30)}
        return {name: amount for name, amount in {**wanted, **self.resources}.items() if amount}


class ServerBundle(Bundle):
    """What each model server takes of its node."""

    WHAT = "a model server"
    SETTING = "machine.cluster.servers"

    tensor_parallel_size: NonNegativeInt = 0
    """GPUs of its node that a server takes, over which vLLM splits the model; 0: it is on CPU."""

    @property
    def gpus(self) -> int:
        return self.tensor_parallel_size


class TrainerBundle(Bundle):
    """What the trainer's ranks on a node, `machine.trainer.processes`, take of it together."""

    WHAT = "the trainer's ranks"
    SETTING = "machine.cluster.trainer"

    num_gpus: NonNegativeInt = 0
    """GPUs of each node that the ranks on it take, one each; 0: they are on CPU."""

    @property
    def gpus(self) -> int:
        return self.num_gpus


class ClusterSettings(Settings):
    """A Ray cluster that exists, and what each worker takes of it."""

    address: str = Field(pattern=r"^(auto|(ray://)?(\[[0-9a-fA-F:]+\]|[^\s:/@\[\]]+):[0-9]{1,5})$")
    """HOST:PORT of the cluster's head, ray://HOST:PORT from outside of it, or auto on one of its nodes."""
    num_cpus: Annotated[NonNegativeFloat, AfterValidator(_countable)] = 1.0
    """CPUs that a worker takes of its node."""
    num_gpus: Annotated[NonNegativeFloat, AfterValidator(_countable), AfterValidator(_whole_or_shared)] = 0.0
    """GPUs that a worker takes of its node, to draw with."""
    memory_gib: NonNegativeFloat = 0.0
    """GiB of memory that a worker takes of its node; 0: it is not counted."""
    resources: Resources = Field({})
    """What else a worker takes, by the names that `ray start --resources` gave: {simulator = 1}."""
    start_timeout: PositiveFloat = 600.0
    """Seconds until nodes have room for a worker, a server or the trainer; it may have to grow first."""
    servers: ServerBundle | None = None
    """What each of machine.servers.count takes of its node. None: servers are on the run's machine."""
    trainer: TrainerBundle | None = None
    """What the trainer's ranks take of each of machine.trainer.nodes. None: they are on the run's machine."""

    def options(self) -> dict[str, Any]:
        """What Ray is told of each worker."""
        return {
            "num_cpus": self.num_cpus,
            "num_gpus": self.num_gpus,
            "memory": int(self.memory_gib * 2**30) or None,
            "resources": self.resources,
            "scheduling_strategy": "SPREAD",
        }

    def resources_of_node(self) -> dict[str, float]:
        """What a worker takes, as resources of Ray by name."""
        wanted = {"CPU": self.num_cpus, "GPU": self.num_gpus, "memory": int(self.memory_gib * 2**30)}
        return {name: amount for name, amount in {**wanted, **self.resources}.items() if amount}
