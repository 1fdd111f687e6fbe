"""Adapters alone, through a folder that the servers can read."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import httpx

from armature.components.contracts.errors import WeightSyncError
from armature.components.inference.adapters import served_name
from armature.components.inference.client import MODEL_NAME
from armature.components.inference.endpoint import Endpoint
from armature.components.inference.replies import exchange
from armature.components.inference.weights.base import Publish, post

_REMEDY = (
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
            await post(http, endpoint, "/v1/unload_lora_adapter", {"lora_name": name}, remedy=_REMEDY)
        body = {"lora_name": served_name(adapter), "lora_path": str(adapter)}
        await post(http, endpoint, "/v1/load_lora_adapter", body, remedy=_REMEDY)


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
