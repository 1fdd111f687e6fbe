"""Where workers are, of environments and of statistics, if not on this machine."""

from __future__ import annotations

from typing import Any

from pydantic import Field, NonNegativeFloat, PositiveFloat

from components.contracts.settings import Settings


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
        600.0, description="Seconds until a node has room for a worker; a cluster may have to grow first."
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
