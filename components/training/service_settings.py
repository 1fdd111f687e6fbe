"""What a trainer service is started with. Torch-free."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveFloat, PositiveInt

from components.contracts.errors import ConfigurationError
from components.contracts.machine import Machine
from components.models.settings import ModelSettings
from components.training.settings import TrainerSettings


class PolicySettings(BaseModel):
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

    policy: PolicySettings
    workspace: Path = Field(description="Checkpoints, address, logs and errors of the service.")
    processes: PositiveInt
    gpus: tuple[int, ...] = Field(description="CUDA devices, one per process; empty on CPU.")
    shard: bool = Field(description="Split the model over the processes (FSDP2) instead of copying it to each.")
    threads: NonNegativeInt
    loader_workers: NonNegativeInt
    weight_transfer: Literal["file", "nccl", "ipc"]
    sync_timeout: PositiveFloat

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


def service_settings(policy: PolicySettings, machine: Machine, workspace: Path) -> ServiceSettings:
    """The service on `machine`: several GPUs share one model, several CPU processes have one each.

    Raises:
        ConfigurationError: the machine has several nodes.
    """
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
    )
