"""What a trainer service is started with. Torch-free."""

from __future__ import annotations

from ipaddress import ip_address
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveFloat, PositiveInt

from components.contracts.errors import ConfigurationError
from components.contracts.machine import Machine
from components.models.settings import ModelSettings
from components.training.settings import TrainerSettings


class TrainerPolicySettings(BaseModel):
    """What decides the results of a trainer service: which model, trained how, on which images."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model_path: Path = Field(description="Folder of the model that the run begins with.")
    model: ModelSettings
    trainer: TrainerSettings
    temperature: PositiveFloat = Field(description="Temperature of the sampler.")
    images: Path = Field(description="Root of the image store.")


class ServiceSettings(BaseModel):
    """All that the processes of the service read."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    policy: TrainerPolicySettings
    workspace: Path = Field(description="Checkpoints, address, logs and errors of the service.")
    processes: PositiveInt
    gpus: tuple[int, ...] = Field(description="CUDA devices, one per process; empty on CPU.")
    shard: bool = Field(description="Split the model over the processes (FSDP2) instead of copying it to each.")
    threads: NonNegativeInt
    loader_workers: NonNegativeInt
    weight_transfer: Literal["file", "nccl", "ipc"]
    sync_timeout: PositiveFloat
    ready_timeout: PositiveFloat = Field(description="Seconds that ranks wait for each other.")
    interface: str | None = Field(description="Network interface of collectives; None: loopback.")

    @property
    def checkpoints(self) -> Path:
        return self.workspace / "checkpoints"

    @property
    def address(self) -> Path:
        """Rank 0 writes its URL here when it is ready."""
        return self.workspace / "address.json"

    def error(self, rank: int) -> Path:
        """Where a rank writes what ended it."""
        return self.workspace / f"error-{rank}.json"


def service_settings(policy: TrainerPolicySettings, machine: Machine, workspace: Path) -> ServiceSettings:
    """The service on `machine`: several GPUs share one model, several CPU processes have one each.

    Raises:
        ConfigurationError: the machine has several nodes, or NCCL is to reach servers elsewhere by no network named.
    """
    distant = [url for url in machine.endpoints if not _is_loopback(url)]
    if machine.weight_transfer == "nccl" and distant and machine.trainer_interface is None:
        raise ConfigurationError(
            "NCCL sends the weights to servers on other machines, and no network for it is named",
            where=f"machine.endpoints = {', '.join(distant)}",
            remedy="set machine.trainer_interface to the private network between trainer and servers",
        )
    if machine.trainer_nodes > 1:
        raise ConfigurationError(
            "the trainer service runs on one node: it is fed and asked for weights by the flow while servers generate",
            where=f"machine.trainer_nodes = {machine.trainer_nodes}",
            remedy="set it to 1; only the stage train-vla trains on several",
        )
    return ServiceSettings(
        policy=policy,
        workspace=workspace.resolve(),
        processes=machine.trainer_processes,
        gpus=machine.trainer_gpus,
        shard=machine.trainer_processes > 1 and bool(machine.trainer_gpus),
        threads=machine.threads,
        loader_workers=machine.loader_workers,
        weight_transfer=machine.weight_transfer,
        sync_timeout=machine.sync_timeout,
        ready_timeout=machine.ready_timeout,
        interface=machine.trainer_interface,
    )


def _is_loopback(url: str) -> bool:
    host = urlsplit(url).hostname or ""
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False
