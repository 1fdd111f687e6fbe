"""What a trainer service is started with. Torch-free."""

from __future__ import annotations

import json
import traceback
from ipaddress import ip_address
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, NonNegativeInt, PositiveFloat

from armature.components.contracts import errors
from armature.components.contracts.errors import ArmatureError, ConfigurationError, TrainerError
from armature.components.contracts.machine import Machine
from armature.components.machine.registry import Registry
from armature.components.training.processes import TrainerProcesses

# Errors between the processes of a trainer service and its client, as JSON.


class FatalServiceError(Exception):
    """Ends the service; its cause is what went wrong."""


def describe(error: BaseException) -> dict[str, str]:
    """The class, its code and three parts if it has them, and where it came from."""
    document = {
        "class": type(error).__name__,
        "what": f"{type(error).__name__}: {error}",
        "code": "",
        "where": "",
        "remedy": "",
        "traceback": "".join(traceback.format_exception(error)),
    }
    if isinstance(error, ArmatureError):
        document |= {"what": error.what, "code": error.code, "where": error.where, "remedy": error.remedy}
    return document


def rebuild(document: Any) -> ArmatureError:
    """The error that `describe` described; a TrainerError with the traceback if it was not one of ours."""
    parts = document if isinstance(document, dict) else {}
    name, what, code, where, remedy, origin = (
        str(parts.get(key, "")) for key in ("class", "what", "code", "where", "remedy", "traceback")
    )
    kind = getattr(errors, name, None)
    if isinstance(kind, type) and issubclass(kind, ArmatureError):
        return kind(what, code=code, where=where, remedy=remedy)
    return TrainerError(f"the trainer failed: {what or 'it does not say why'}", where=origin)


def read_error(file: Path) -> dict[str, Any] | None:
    """The document in `file` that a rank wrote before it ended; None if there is none, or only a part of it."""
    try:
        document = json.loads(file.read_bytes())
    except (FileNotFoundError, ValueError, RecursionError):
        return None
    return document if isinstance(document, dict) else None


WORKERS = Registry(
    "trainer",
    "armature.trainers",
    {
        "tokens": "armature.components.vlm.worker:TrainerWorker",
        "policy": "armature.components.robots.imitation.worker:PolicyWorker",
        "policy-rl": "armature.components.robots.rl.worker:RobotRLWorker",
    },
)
"""What each rank runs: a `armature.components.training.service_worker.ServiceWorker`."""


class TrainingSettings(Protocol):
    """What a worker of WORKERS reads; a pydantic model."""

    WORKER: ClassVar[str]

    @property
    def seed(self) -> int: ...
    def model_dump(self, *, mode: Literal["json"]) -> dict[str, Any]: ...


class ServiceSettings(BaseModel):
    """All that the processes of the service read."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    worker: str
    """Name in WORKERS."""
    training: dict[str, Any]
    """What that worker reads."""
    seed: NonNegativeInt
    workspace: Path
    """Checkpoints, address and log of the service."""
    processes: TrainerProcesses
    loader_workers: NonNegativeInt
    weight_transfer: Literal["file", "delta", "nccl", "ipc"]
    sync_timeout: PositiveFloat

    @property
    def file(self) -> Path:
        """Where every process reads this."""
        return self.workspace / "trainer.json"

    @property
    def checkpoints(self) -> Path:
        return self.workspace / "checkpoints"

    @property
    def address(self) -> Path:
        """Rank 0 writes its URL here when it is ready."""
        return self.workspace / "address.json"


def service_settings(training: TrainingSettings, machine: Machine, workspace: Path) -> ServiceSettings:
    """The service on `machine`: several GPUs share one model, several CPU processes have one each.

    Raises:
        ConfigurationError: NCCL is to reach servers elsewhere by no network named.
    """
    distant = [url for url in machine.endpoints if not _is_loopback(url)]
    if machine.weight_transfer == "nccl" and distant and machine.trainer_interface is None:
        raise ConfigurationError(
            "NCCL sends the weights to servers on other machines, and no network for it is named",
            code="network_missing",
            where=f"machine.endpoints = {', '.join(distant)}",
            remedy="set machine.trainer_interface to the private network between trainer and servers",
        )
    return ServiceSettings(
        worker=training.WORKER,
        training=training.model_dump(mode="json"),
        seed=training.seed,
        workspace=workspace.resolve(),
        processes=TrainerProcesses.of(machine),
        loader_workers=machine.loader_workers,
        weight_transfer=machine.weight_transfer,
        sync_timeout=machine.sync_timeout,
    )


def _is_loopback(url: str) -> bool:
    host = urlsplit(url).hostname or ""
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False
