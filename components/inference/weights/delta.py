"""What changed since the version before, through a folder that the servers can read."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import httpx

from armature.components.contracts.errors import WeightSyncError
from armature.components.inference.endpoint import Endpoint
from armature.components.inference.weights.base import Publish, post

DELTA = "delta.safetensors"
"""Of `armature_served.deltas`, which cannot be imported without torch."""

_REMEDY = (
    "read its log; a server that is joined has to be started for it: `armature serve MODEL --machine "
    "weight_transfer=delta`"
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
        reply = await post(http, endpoint, "/collective_rpc", body, remedy=_REMEDY)
        results = reply.document.get("results")
        if not isinstance(results, list) or not results or any(result is not None for result in results):
            raise WeightSyncError(
                f"load_version answered {reply.text}", code="server_refuses_weights", where=endpoint.url, remedy=_REMEDY
            )
