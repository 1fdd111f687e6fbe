"""The contract between the pool and a way of moving weights."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import httpx

from components.contracts.errors import WeightSyncError
from components.inference.endpoint import Endpoint

Publish = Callable[[Sequence[Endpoint]], Awaitable[None]]
"""Makes the trainer send its weights to these servers, all of them together."""


class WeightTransfer(Protocol):
    """Brings new weights to servers that answer no requests meanwhile."""

    single: bool
    """Whether one server can be brought up to date alone, at any time, from the folder of a checkpoint."""

    async def transfer(
        self, http: httpx.AsyncClient, endpoints: Sequence[Endpoint], weights: Path, publish: Publish | None
    ) -> None:
        """Bring the weights to all `endpoints`.

        Raises:
            WeightSyncError: a server refused them.
            httpx.TransportError: a server is gone.
        """


async def post(http: httpx.AsyncClient, endpoint: Endpoint, path: str, body: Any = None) -> httpx.Response:
    """POST to one of vLLM's control routes.

    Raises:
        WeightSyncError: it answered anything but 200.
    """
    response = await http.post(f"{endpoint.url}{path}", json=body, headers=endpoint.headers)
    if response.status_code != 200:
        raise WeightSyncError(
            f"{path} answered {response.status_code}: {response.text[:500]}",
            where=endpoint.url,
            remedy="read the server's log; a 404 means that it runs without VLLM_SERVER_DEV_MODE=1",
        )
    return response
