"""Low-rank adapters that servers hold beside the weights that they were started with."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from armature.components.contracts.errors import ConfigurationError
from armature.components.contracts.machine import Machine, Scalar
from armature.components.inference.client import MODEL_NAME

_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""What vLLM (0.26 to 0.32) makes room for."""


@dataclass(frozen=True)
class ServedAdapters:
    """What the servers of a pool have to make room for.

    rank: the largest of an adapter.
    vision: whether layers of the vision tower and the projector have adapters as well.
    """

    rank: int
    vision: bool = False

    def arguments(self) -> dict[str, Scalar]:
        """Of vLLM's command line.

        Raises:
            ConfigurationError: vLLM takes no adapters of this rank.
        """
        room = next((rank for rank in _RANKS if rank >= self.rank), None)
        if room is None:
            raise ConfigurationError(
                f"vLLM takes adapters of rank {_RANKS[-1]} at most, not {self.rank}",
                code="adapter_rank_too_large",
                where="model.lora.rank",
                remedy='lower it, or set model.lora.served_as = "merged"',
            )
        towers: dict[str, Scalar] = {"enable-tower-connector-lora": True} if self.vision else {}
        return {"enable-lora": True, "max-lora-rank": room, **towers}

    def check(self, machine: Machine) -> None:
        """
        Raises:
            ConfigurationError: whole weights are to be sent between GPUs.
        """
        if machine.weight_transfer != "file":
            raise ConfigurationError(
                f"adapters reach the servers as files, and weight_transfer is {machine.weight_transfer!r}",
                code="adapters_need_files",
                where="machine.weight_transfer",
                remedy='leave it out, or set model.lora.served_as = "merged"',
            )


def served_name(adapter: Path) -> str:
    """What requests call the adapter in this folder, one of a series whose folders have different names.

    Each version has a name of its own: vLLM's prefix cache tells adapters apart by it, and a server that lost the
    version refuses the request. Loading in place under one name would have every batch read the files again.
    """
    return f"{MODEL_NAME}-{adapter.name}"
