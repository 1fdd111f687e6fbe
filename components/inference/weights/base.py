"""The contract between the pool and a way of moving weights."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import httpx

from armature.components.contracts.errors import WeightSyncError
from armature.components.inference.endpoint import Endpoint
from armature.components.inference.replies import Reply, exchange

if TYPE_CHECKING:
    from armature.components.inference.weights.parameters import Parameters

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
