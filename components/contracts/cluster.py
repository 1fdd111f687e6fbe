"""Where workers, of environments and of statistics, and model servers are, if not on this machine."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from components.contracts.settings import Settings


class ServerBundle(Settings):
    """What each model server takes of its node, as a bundle of a placement group."""

    num_cpus: PositiveInt = Field(4, description="CPUs that a server takes of its node.")
    tensor_parallel_size: NonNegativeInt = Field(
        0, description="GPUs of its node that a server takes, over which vLLM splits the model; 0: it is on CPU."
    )
    memory_gib: NonNegativeFloat = Field(
        0.0, description="GiB of memory that a server takes of its node; 0: it is not counted."
    )
    resources: dict[str, PositiveFloat] = Field(
        {}, description="What else a server takes, by the names that `ray start --resources` gave: {fast = 1}."
    )
    strategy: Literal["SPREAD", "PACK", "STRICT_SPREAD", "STRICT_PACK"] = Field(
        "SPREAD",
        description="How Ray places the servers: SPREAD over the nodes, PACK on as few as there is room on; with "
        "STRICT_ in no other way.",
    )

    def options(self) -> dict[str, Any]:
        """What Ray is told of the actor that has a server."""
        return {
            "num_cpus": self.num_cpus,
            "num_gpus": self.tensor_parallel_size,
            "memory": int(self.memory_gib * 2**30) or None,
            "resources": self.resources,
        }

    def resources_of_node(self) -> dict[str, float]:
        """The same, as resources of Ray by name."""
        wanted = {"CPU": self.num_cpus, "GPU": self.tensor_parallel_size, "memory": int(self.memory_gib * 2**30)}
        return {name: amount for name, amount in {**wanted, **self.resources}.items() if amount}


class ClusterSettings(Settings):
    """A Ray cluster that exists, and what each worker takes of it."""

    address: str = Field(
        pattern=r"^(auto|(ray://)?(\[[0-9a-fA-F:]+\]|[^\s:/@\[\]]+):[0-9]{1,5})$",
        description="HOST:PORT of the cluster's head, ray://HOST:PORT from outside of it, or auto on one of its nodes.",
    )
    num_cpus: NonNegativeFloat = Field(1.0, description="CPUs that a worker takes of its node.")
    num_gpus: NonNegativeFloat = Field(0.0, description="GPUs that a worker takes of its node, to draw with.")
    memory_gib: NonNegativeFloat = Field(
        0.0, description="GiB of memory that a worker takes of its node; 0: it is not counted."
    )
    resources: dict[str, PositiveFloat] = Field(
        {}, description="What else a worker takes, by the names that `ray start --resources` gave: {simulator = 1}."
    )
    start_timeout: PositiveFloat = Field(
        600.0, description="Seconds until a node has room for a worker or a server; a cluster may have to grow first."
    )
    servers: ServerBundle | None = Field(
        None, description="What each of machine.servers takes of its node. None: servers are on the run's machine."
    )

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
