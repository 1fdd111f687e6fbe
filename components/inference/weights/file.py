"""Weights through a checkpoint folder that the servers can read."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import httpx

from armature.components.contracts.errors import WeightSyncError
from armature.components.inference.weights.base import Endpoint, Publish, post


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
