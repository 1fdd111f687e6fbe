"""Which weights the servers of a pool hold, and how all of them get new ones."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from pathlib import Path

import httpx
import numpy as np

from components.contracts.errors import WeightSyncError
from components.contracts.rollouts import LogProbs
from components.inference.checkpoint import read_tensors
from components.inference.replica import Replica, probe, reset_caches
from components.inference.weights import WEIGHT_TRANSFERS, Publish, WeightTransfer

log = logging.getLogger(__name__)

PROBE_TOLERANCE = 0.05
"""Largest difference, in nats, between two servers that hold the same weights (bfloat16, other batches)."""


class ServedWeights:
    """The current weights of a pool: the folder to start a server from, its version, and its fingerprint.

    The fingerprint is what the first server answered to a fixed prompt at this version. Every other server that
    is given the version, or is started from its folder later, has to answer the same.

    Attributes:
        changing: held while a server joins or weights change, so that neither sees the other half done.
        folder, folder_version: what a server is started with. Not the current weights, once the trainer has sent
            newer ones from its GPUs.
    """

    def __init__(
        self, weights: Path, version: int, transfer: str, forbidden_token_ids: Sequence[int], load_on_join: bool
    ) -> None:
        self.folder, self.folder_version, self.version = weights.absolute(), version, version
        self._first_version, self._load_on_join = version, load_on_join
        self.changing = asyncio.Lock()
        self._transfer: WeightTransfer = WEIGHT_TRANSFERS[transfer]()
        self._tensors = read_tensors(weights)
        self._forbidden = forbidden_token_ids
        self._fingerprint: tuple[int, LogProbs] | None = None

    async def give(
        self,
        http: httpx.AsyncClient,
        replicas: Sequence[Replica],
        weights: Path,
        version: int,
        publish: Publish | None,
    ) -> None:
        """Give every ready replica the new weights and verify. The caller holds `changing`.

        Raises:
            DataError: the folder cannot be read.
            WeightSyncError: it holds another model, a server refused it, or servers disagree.
        """
        if version <= self.version:
            raise WeightSyncError(
                f"version {version} is not newer than {self.version}", where=str(weights), remedy="count upwards"
            )
        if self._transfer.single:
            self._check_folder(weights)
            self.folder, self.folder_version = weights.absolute(), version
        self.version = version
        ready = [replica for replica in replicas if replica.ready]
        if self._transfer.single:
            await asyncio.gather(*(self._bring_up_to_date(http, replica) for replica in ready))
            return
        if len(ready) < len(replicas):
            missing = ", ".join(replica.name for replica in replicas if not replica.ready)
            raise WeightSyncError("not every server is up", where=missing, remedy="resume from the last checkpoint")
        try:
            await self._transfer.transfer(http, [replica.endpoint for replica in ready], weights, publish)
            await asyncio.gather(*(self._verify(http, replica) for replica in ready))
        except httpx.TransportError as error:
            raise WeightSyncError(
                f"a server went away: {error!r}", where=str(weights), remedy="resume from the last checkpoint"
            ) from error

    async def make_current(self, http: httpx.AsyncClient, replica: Replica) -> bool:
        """See that a server that joins holds the current weights; whether it may be used now.

        Raises:
            WeightSyncError: it does not, and cannot be given them alone.
            httpx.TransportError: it is gone.
        """
        if replica.version == self.version:
            await self._check_fingerprint(http, replica)
            return True
        never_synced = self.version == self._first_version
        if self._transfer.single and (self._load_on_join or not never_synced):
            return await self._bring_up_to_date(http, replica)
        if never_synced:
            # Not ours: it should have been started with this folder; the fingerprints of the servers that join
            # after the first have to agree.
            await self._check_fingerprint(http, replica)
            replica.version = self.version
            return True
        raise WeightSyncError(
            f"it holds version {replica.version}, not {self.version}, and only the trainer can send that",
            where=replica.name,
            remedy="resume from the last checkpoint",
        )

    def _check_folder(self, weights: Path) -> None:
        tensors = read_tensors(weights)
        if tensors == self._tensors:
            return
        names = tensors.keys() | self._tensors.keys()
        name = min(name for name in names if tensors.get(name) != self._tensors.get(name))
        raise WeightSyncError(
            f"a checkpoint of another model: {name} is {tensors.get(name, 'missing')}, the servers have "
            f"{self._tensors.get(name, 'none')}",
            where=str(weights),
            remedy="publish with the names, shapes and types of the checkpoint that the servers started with",
        )

    async def _bring_up_to_date(self, http: httpx.AsyncClient, replica: Replica) -> bool:
        """Load the current weights into one server and verify. False: it is gone, its keeper will see to it."""
        try:
            await self._transfer.transfer(http, [replica.endpoint], self.folder, None)
            await self._verify(http, replica)
        except httpx.TransportError as error:
            log.warning("%s went away while it was given weights: %r", replica.name, error)
            replica.ready = False
            replica.suspect.set()
            return False
        return True

    async def _verify(self, http: httpx.AsyncClient, replica: Replica) -> None:
        await reset_caches(http, replica.endpoint)
        await self._check_fingerprint(http, replica)
        replica.version = self.version

    async def _check_fingerprint(self, http: httpx.AsyncClient, replica: Replica) -> None:
        values = await probe(http, replica.endpoint, self._forbidden)
        if self._fingerprint is None or self._fingerprint[0] != self.version:
            self._fingerprint = (self.version, values)
        difference = float(np.abs(values - self._fingerprint[1]).max())
        if not difference <= PROBE_TOLERANCE:
            raise WeightSyncError(
                f"at version {self.version} its log-probs of a fixed prompt differ by {difference:.3g} from those of "
                "the first server that was asked: it does not hold the same weights, or they are not finite",
                where=replica.name,
                remedy="read its log for weights that were not loaded",
            )
