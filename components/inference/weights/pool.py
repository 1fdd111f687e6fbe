"""The pool's side of each way in which new weights reach the servers."""

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


# The contract between the pool and a way of moving weights.

Publish = Callable[[Sequence[Endpoint]], Awaitable[None]]
"""Makes the trainer send its weights to these servers, all of them together."""


class WeightTransfer(Protocol):
    """Brings new weights to servers that answer no requests meanwhile."""

    single: bool
    """Whether one server can be brought up to date alone, at any time, from a folder."""

    def whole(self, folder: Path) -> bool:
        """Whether the weights in this folder are a checkpoint that a server can be started with."""

    async def transfer(
        self, http: httpx.AsyncClient, endpoints: Sequence[Endpoint], weights: Path, publish: Publish | None
    ) -> None:
        """Bring the weights to all `endpoints`.

        Raises:
            WeightSyncError: a server refused them.
            httpx.TransportError: a server is gone.
        """


class WeightSender(Protocol):
    """The trainer's side of a transfer between GPUs: made and used on all its ranks alike, for as many versions as
    the same servers live.

    Args:
        endpoints: the servers.
        timeout: seconds for each transfer.
    """

    endpoints: Sequence[Endpoint]

    def __init__(self, endpoints: Sequence[Endpoint], timeout: float) -> None: ...

    def send(self, parameters: Parameters) -> None:
        """Send to all servers.

        Raises:
            WeightSyncError: a server refused, or the transfer takes too long. This sender is then of no more use.
        """

    def close(self) -> None:
        """End the connections, also those with servers that are gone."""


_REMEDY = (
    """read the server's log; a 404 means that it runs without VLLM_SERVER_DEV_MODE=1, a 423 that another run has it"""
)


async def post(
    http: httpx.AsyncClient, endpoint: Endpoint, path: str, body: Any = None, remedy: str = _REMEDY
) -> Reply:
    """POST to one of vLLM's control routes.

    Raises:
        WeightSyncError: it answered anything but 200.
        BadReply: it answered with more than any well-behaved server does.
        httpx.TransportError: it is gone.
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


# Weights through a checkpoint folder that the servers can read.


class FileTransfer:
    """Each server loads the folder itself, in place, without starting again."""

    single = True

    def whole(self, folder: Path) -> bool:
        return True

    async def transfer(
        self, http: httpx.AsyncClient, endpoints: Sequence[Endpoint], weights: Path, publish: Publish | None
    ) -> None:
        """See `WeightTransfer.transfer`; `publish` is not used."""
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


# Weights from the trainer's GPUs: the pool's side of NCCL and CUDA IPC.


class DeviceTransfer:
    """The trainer sends; the pool only holds back requests meanwhile, resets caches and verifies.

    The trainer uses the `WeightSender` of the same name on all its ranks, and connects again when the servers are
    others. A server cannot be given the current weights alone: one that joins, or died and is back, gets the next ones.
    One that dies while weights are sent fails the sync.
    """

    single = False

    def whole(self, folder: Path) -> bool:
        return True

    async def transfer(
        self, http: httpx.AsyncClient, endpoints: Sequence[Endpoint], weights: Path, publish: Publish | None
    ) -> None:
        """See `WeightTransfer.transfer`."""
        if publish is None:
            raise WeightSyncError(
                "only the trainer can send weights from its GPUs",
                code="trainer_needed",
                where="machine.servers.weight_transfer",
                remedy='give sync(publish=...), or set machine.servers.weight_transfer = "file"',
            )
        await publish(endpoints)


# What changed since the version before, through a folder that the servers can read.

DELTA = "delta.safetensors"
"""Of `armature_served.deltas`, which cannot be imported without torch."""

_DELTA_REMEDY = (
    "read its log; a server that is joined has to be started for it: `armature serve MODEL --machine "
    "servers.weight_transfer=delta`"
)


class DeltaTransfer:
    """Each server's workers hold the weights in main memory, change them there, and load them in place.

    A server that holds another version, or none, reads the last checkpoint and all changes since.
    """

    single = True

    def whole(self, folder: Path) -> bool:
        return not (folder / DELTA).exists()

    async def transfer(
        self, http: httpx.AsyncClient, endpoints: Sequence[Endpoint], weights: Path, publish: Publish | None
    ) -> None:
        """See `WeightTransfer.transfer`; `publish` is not used."""
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


# Adapters alone, through a folder that the servers can read.

_ADAPTER_REMEDY = (
    "read its log; a 404 means that it takes no adapters: own servers are started so, one that is joined needs "
    "`armature serve MODEL --max-lora-rank RANK`"
)


class AdapterTransfer:
    """Each server loads the adapter that PEFT wrote into the folder, and forgets those before it."""

    single = True

    def whole(self, folder: Path) -> bool:
        return False

    async def transfer(
        self, http: httpx.AsyncClient, endpoints: Sequence[Endpoint], weights: Path, publish: Publish | None
    ) -> None:
        """See `WeightTransfer.transfer`; `publish` is not used."""
        await asyncio.gather(*(self._load(http, endpoint, weights) for endpoint in endpoints))

    async def _load(self, http: httpx.AsyncClient, endpoint: Endpoint, adapter: Path) -> None:
        for name in await _adapters(http, endpoint):
            await post(http, endpoint, "/v1/unload_lora_adapter", {"lora_name": name}, remedy=_ADAPTER_REMEDY)
        body = {"lora_name": served_name(adapter), "lora_path": str(adapter)}
        await post(http, endpoint, "/v1/load_lora_adapter", body, remedy=_ADAPTER_REMEDY)


async def _adapters(http: httpx.AsyncClient, endpoint: Endpoint) -> list[str]:
    """The names of those that the server has.

    Raises:
        WeightSyncError: it does not say.
        httpx.TransportError: it is gone.
    """
    reply = await exchange(http, "GET", f"{endpoint.url}/v1/models", endpoint.headers)
    try:
        names = [str(entry["id"]) for entry in reply.document["data"]]
    except (LookupError, TypeError) as error:
        raise WeightSyncError(
            f"/v1/models answers with no list of models: {reply.text}", code="model_list_invalid", where=endpoint.url
        ) from error
    return [name for name in names if name != MODEL_NAME]


# What a name in `machine.servers.weight_transfer` stands for: on the pool's side, and on the trainer's.
#
# `adapter` is not one of them: it is what moves where `model.lora.served_as` says so.

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
