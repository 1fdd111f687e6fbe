"""Weights from the trainer's GPUs: the pool's side of NCCL and CUDA IPC."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import httpx

from armature.components.contracts.errors import WeightSyncError
from armature.components.inference.endpoint import Endpoint
from armature.components.inference.weights.base import Publish


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
                where="machine.weight_transfer",
                remedy='give sync(publish=...), or set machine.weight_transfer = "file"',
            )
        await publish(endpoints)
