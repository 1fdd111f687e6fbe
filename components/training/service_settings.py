"""Settings of a trainer service, and the errors that its processes and its client exchange as JSON. Torch-free."""

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
from armature.components.contracts.installation import installation_error
from armature.components.contracts.machine import Machine
from armature.components.machine.registry import Registry
from armature.components.training.processes import TrainerProcesses

TOKEN = "ARMATURE_TRAINER_TOKEN"
"""Environment variable with the bearer token that the client's requests must have."""


class FatalServiceError(Exception):
    """An error that ends the service. Its argument is the original error."""


def describe(error: BaseException) -> dict[str, str]:
    """Return an error as JSON: its class, message, traceback and, for an `ArmatureError`, code, place and remedy."""
    error = installation_error(error) or error
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
    """Return the error from which `describe` made `document`.

    An error that is not an `ArmatureError` becomes a `TrainerError` with the traceback as its place.
    """
    parts = document if isinstance(document, dict) else {}
    name, what, code, where, remedy, origin = (
        str(parts.get(key, "")) for key in ("class", "what", "code", "where", "remedy", "traceback")
    )
    kind = getattr(errors, name, None)
    if isinstance(kind, type) and issubclass(kind, ArmatureError):
        return kind(what, code=code, where=where, remedy=remedy)
    return TrainerError(f"the trainer failed: {what or 'no reason was reported'}", where=origin)


def read_error(file: Path) -> dict[str, Any] | None:
    """Return the error that a rank described in `file` before it ended; None if the file is missing or incomplete."""
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
"""Subclasses of `armature.components.training.service_worker.ServiceWorker`, one of which each rank runs."""


class TrainingSettings(Protocol):
    """The settings of a worker, a pydantic model."""

    WORKER: ClassVar[str]
    """Name of the worker in WORKERS."""

    @property
    def seed(self) -> int: ...
    def model_dump(self, *, mode: Literal["json"]) -> dict[str, Any]: ...


class ServiceSettings(BaseModel):
    """The complete settings of a service, which the client writes to a file and every rank reads."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    worker: str
    """Name of the worker in WORKERS."""
    training: dict[str, Any]
    """The worker's own settings."""
    seed: NonNegativeInt
    workspace: Path
    """Folder with the checkpoints, the address and the log of the service."""
    processes: TrainerProcesses
    loader_workers: NonNegativeInt
    weight_transfer: Literal["file", "delta", "nccl", "ipc"]
    sync_timeout: PositiveFloat

    @property
    def file(self) -> Path:
        """File in which every rank reads these settings."""
        return self.workspace / "trainer.json"

    @property
    def checkpoints(self) -> Path:
        """Folder of the checkpoints."""
        return self.workspace / "checkpoints"

    @property
    def address(self) -> Path:
        """File to which rank 0 writes its URL when it is ready."""
        return self.workspace / "address.json"


def service_settings(training: TrainingSettings, machine: Machine, workspace: Path) -> ServiceSettings:
    """Return the settings of a service that runs `training` on `machine`; see `TrainerProcesses.of`.

    Raises:
        ConfigurationError: NCCL is to reach servers on other machines, and no network interface is set.
    """
    distant = [url for url in machine.servers.endpoints if not _is_loopback(url)]
    if machine.servers.weight_transfer == "nccl" and distant and machine.trainer.interface is None:
        raise ConfigurationError(
            "NCCL is to send the weights to servers on other machines, but its network interface is not set",
            code="network_missing",
            where=f"machine.servers.endpoints = {', '.join(distant)}",
            remedy="set machine.trainer.interface to the private network between trainer and servers",
        )
    return ServiceSettings(
        worker=training.WORKER,
        training=training.model_dump(mode="json"),
        seed=training.seed,
        workspace=workspace.resolve(),
        processes=TrainerProcesses.of(machine),
        loader_workers=machine.trainer.loader_workers,
        weight_transfer=machine.servers.weight_transfer,
        sync_timeout=machine.limits.sync_timeout,
    )


def _is_loopback(url: str) -> bool:
    host = urlsplit(url).hostname or ""
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False
