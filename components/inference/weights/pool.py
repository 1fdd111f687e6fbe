"""The pool's side of weight transfers: through files, deltas, adapters, NCCL or CUDA IPC."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import httpx

from armature.components.contracts.errors import WeightSyncError
from armature.components.inference.client import MODEL_NAME
from armature.components.inference.command import served_name
from armature.components.inference.replies import Endpoint, Reply, exchange
from armature.components.machine.registry import Registry

if TYPE_CHECKING:
    from armature.components.inference.weights.trainer import Parameters


# --- The protocol between the pool, the trainer and a transfer ---

Publish = Callable[[Sequence[Endpoint]], Awaitable[None]]
"""A function that makes the trainer send its weights to all these servers together."""


class WeightTransfer(Protocol):
    """A way to load new weights into servers, which answer no requests meanwhile."""

    single: bool
    """True if one server can be updated alone, at any time, from a folder."""

    def whole(self, folder: Path) -> bool:
        """Return True if the folder holds a checkpoint that a server can be started with."""

    async def transfer(
        self, http: httpx.AsyncClient, endpoints: Sequence[Endpoint], weights: Path, publish: Publish | None
    ) -> None:
        """Load the weights into all `endpoints`.

        Raises:
            WeightSyncError: a server rejected them.
            httpx.TransportError: a server is gone.
        """


class WeightSender(Protocol):
    """The trainer's side of a transfer between GPUs. Every rank of the trainer makes one and calls it in the same
    order.

    One sender sends any number of versions, until the servers change.

    Args:
        endpoints: the servers.
        timeout: seconds for each transfer.
    """

    endpoints: Sequence[Endpoint]

    def __init__(self, endpoints: Sequence[Endpoint], timeout: float) -> None: ...

    def send(self, parameters: Parameters) -> None:
        """Send the parameters to all servers.

        Raises:
            WeightSyncError: a server rejected them, or the transfer took too long. Make a new sender afterwards.
        """

    def close(self) -> None:
        """Close all connections to servers, also if a server is gone."""


_REMEDY = (
    """read the server's log; a 404 means that it runs without VLLM_SERVER_DEV_MODE=1, a 423 that another run has it"""
)


async def post(
    http: httpx.AsyncClient, endpoint: Endpoint, path: str, body: Any = None, remedy: str = _REMEDY
) -> Reply:
    """POST to one of vLLM's control routes.

    Raises:
        WeightSyncError: the status is not 200.
        BadReply: the response is too long or compressed.
        httpx.TransportError: the server is gone.
    """
    reply = await exchange(http, "POST", f"{endpoint.url}{path}", endpoint.headers, body)
    if reply.status != 200:
        raise WeightSyncError(
            f"{path} answered {reply.status}: {reply.text}",
            code="server_refuses_weights",
            where=endpoint.url,
            remedy=remedy,
        )
    return reply


class FileTransfer:
    """Let each server load a checkpoint folder in place, without a restart."""

    single = True

    def whole(self, folder: Path) -> bool:
        return True

    async def transfer(
        self, http: httpx.AsyncClient, endpoints: Sequence[Endpoint], weights: Path, publish: Publish | None
    ) -> None:
        """Make all servers load the checkpoint in the folder `weights`; see `WeightTransfer.transfer`. `publish` is not
        used."""
        await asyncio.gather(*(self._reload(http, endpoint, weights) for endpoint in endpoints))

    async def _reload(self, http: httpx.AsyncClient, endpoint: Endpoint, weights: Path) -> None:
        body = {"method": "reload_weights", "kwargs": {"weights_path": str(weights)}}
        reply = await post(http, endpoint, "/collective_rpc", body)
        results = reply.document.get("results")
        if not isinstance(results, list) or not results or any(result is not None for result in results):
            raise WeightSyncError(
                f"reload_weights answered {reply.text}",
                code="server_refuses_weights",
                where=endpoint.url,
                remedy="read its log",
            )


class DeviceTransfer:
    """Let the trainer send weights from its GPUs, by NCCL or CUDA IPC. The pool holds back requests and clears caches.

    The trainer uses the `WeightSender` of the same name on all its ranks, and connects again when the servers change.
    One server alone cannot get the current weights: a server that joins or restarts gets the next version. A server
    that dies during the transfer fails the sync.
    """

    single = False

    def whole(self, folder: Path) -> bool:
        return True

    async def transfer(
        self, http: httpx.AsyncClient, endpoints: Sequence[Endpoint], weights: Path, publish: Publish | None
    ) -> None:
        """Make the trainer send its weights to all servers, by `publish`; see `WeightTransfer.transfer`. The folder
        `weights` is not read."""
        if publish is None:
            raise WeightSyncError(
                "only the trainer can send weights from its GPUs",
                code="trainer_needed",
                where="machine.servers.weight_transfer",
                remedy='give sync(publish=...), or set machine.servers.weight_transfer = "file"',
            )
        await publish(endpoints)


DELTA = "delta.safetensors"
"""File name of a delta, as in `armature_served.deltas`. That module cannot be imported here because it needs torch."""

_DELTA_REMEDY = (
    "read its log; a server that is joined has to be started for it: `armature serve MODEL --machine "
    "servers.weight_transfer=delta`"
)


class DeltaTransfer:
    """Send only the changes since the previous version, through a folder.

    The workers of each server hold the weights in main memory, apply the changes there, and load the result in place. A
    server that does not hold the previous version reads the last whole checkpoint and all changes since.
    """

    single = True

    def whole(self, folder: Path) -> bool:
        return not (folder / DELTA).exists()

    async def transfer(
        self, http: httpx.AsyncClient, endpoints: Sequence[Endpoint], weights: Path, publish: Publish | None
    ) -> None:
        """Make all servers load the version in the folder `weights`; see `WeightTransfer.transfer`. `publish` is not
        used."""
        await asyncio.gather(*(self._load(http, endpoint, weights) for endpoint in endpoints))

    async def _load(self, http: httpx.AsyncClient, endpoint: Endpoint, weights: Path) -> None:
        body = {"method": "load_version", "kwargs": {"folder": str(weights)}}
        reply = await post(http, endpoint, "/collective_rpc", body, remedy=_DELTA_REMEDY)
        results = reply.document.get("results")
        if not isinstance(results, list) or not results or any(result is not None for result in results):
            raise WeightSyncError(
                f"load_version answered {reply.text}",
                code="server_refuses_weights",
                where=endpoint.url,
                remedy=_DELTA_REMEDY,
            )


_ADAPTER_REMEDY = (
    "read the server's log; a 404 means that it was started without adapters: start a joined server with "
    "`armature serve MODEL --max-lora-rank RANK`"
)


class AdapterTransfer:
    """Let each server load the LoRA adapter that PEFT wrote into the folder, and unload earlier adapters."""

    single = True

    def whole(self, folder: Path) -> bool:
        return False

    async def transfer(
        self, http: httpx.AsyncClient, endpoints: Sequence[Endpoint], weights: Path, publish: Publish | None
    ) -> None:
        """Make all servers load the LoRA adapter in the folder `weights`; see `WeightTransfer.transfer`. `publish` is
        not used."""
        await asyncio.gather(*(self._load(http, endpoint, weights) for endpoint in endpoints))

    async def _load(self, http: httpx.AsyncClient, endpoint: Endpoint, adapter: Path) -> None:
        for name in await _adapters(http, endpoint):
            await post(http, endpoint, "/v1/unload_lora_adapter", {"lora_name": name}, remedy=_ADAPTER_REMEDY)
        body = {"lora_name": served_name(adapter), "lora_path": str(adapter)}
        await post(http, endpoint, "/v1/load_lora_adapter", body, remedy=_ADAPTER_REMEDY)


async def _adapters(http: httpx.AsyncClient, endpoint: Endpoint) -> list[str]:
    """Return the names of the adapters that the server has loaded.

    Raises:
        WeightSyncError: the server's list of models is invalid.
        httpx.TransportError: the server is gone.
    """
    reply = await exchange(http, "GET", f"{endpoint.url}/v1/models", endpoint.headers)
    try:
        names = [str(entry["id"]) for entry in reply.document["data"]]
    except (LookupError, TypeError) as error:
        raise WeightSyncError(
            f"/v1/models answers with no list of models: {reply.text}", code="model_list_invalid", where=endpoint.url
        ) from error
    return [name for name in names if name != MODEL_NAME]


# --- The values of `machine.servers.weight_transfer`, on the pool's side and on the trainer's ---
#
# `adapter` is not a value of that setting: it is used if `model.lora.served_as` is "adapter".

WEIGHT_TRANSFERS = Registry(
    "weight transfer",
    "armature.weight_transfers",
    {
        "file": "armature.components.inference.weights.pool:FileTransfer",
        "delta": "armature.components.inference.weights.pool:DeltaTransfer",
        "nccl": "armature.components.inference.weights.pool:DeviceTransfer",
        "ipc": "armature.components.inference.weights.pool:DeviceTransfer",
        "adapter": "armature.components.inference.weights.pool:AdapterTransfer",
    },
)

WEIGHT_SENDERS = Registry(
    "weight sender",
    "armature.weight_senders",
    {
        "nccl": "armature.components.inference.weights.trainer:NcclSender",
        "ipc": "armature.components.inference.weights.trainer:IpcSender",
    },
)
