"""The servers that a pool starts itself, on this machine or on a cluster: made, taken from the pool before, ended."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

from armature.components.contracts.machine import Machine
from armature.components.inference.adapters import ServedAdapters
from armature.components.inference.kept import kept_servers
from armature.components.inference.placed import PlacedHost
from armature.components.inference.replica import Replica
from armature.components.inference.server import VllmServer
from armature.components.inference.settings import ServerSettings
from armature.components.workers.placed import PlacementBundles


class OwnServers:
    """
    Args: see `ServerPool`.
    """

    def __init__(
        self,
        weights: Path,
        settings: ServerSettings,
        machine: Machine,
        log_folder: Path,
        api_key: str,
        adapters: ServedAdapters | None,
    ) -> None:
        self._weights, self._settings, self._machine = weights, settings, machine
        self._log_folder, self._api_key, self._adapters = log_folder, api_key, adapters
        self._kept = kept_servers(machine) if adapters is None else None  # theirs keep the weights they began with
        self._places = (
            PlacementBundles(machine.cluster, machine.server_bundle, machine.servers)
            if machine.cluster is not None and machine.server_bundle is not None
            else None
        )

    def replica(self, index: int) -> Replica:
        """One whose server is not started yet."""
        server = VllmServer(
            self._settings,
            self._machine,
            index=index,
            log_folder=self._log_folder,
            api_key=self._api_key,
            adapters=self._adapters,
            host=PlacedHost(self._places, index) if self._places else None,
        )
        return Replica(server.name, self._api_key, server=server)

    async def take_kept(self, replicas: Sequence[Replica]) -> None:
        """Give them servers that the pool before has kept, if it has."""
        if self._kept is None:
            return
        servers = await asyncio.to_thread(self._kept.take, self._weights, self._settings, self._machine)
        for replica, server in zip(replicas, servers, strict=False):
            server.log_folder = self._log_folder
            replica.server, replica.api_key = server, server.api_key

    async def close(self, replicas: Sequence[Replica], keep: bool) -> None:
        """End the servers, but those that the next pool may take if this one has ended well (`keep`)."""
        servers = [replica.server for replica in replicas if replica.server]
        if self._kept is not None and keep and all(replica.ready for replica in replicas):
            self._kept.keep(servers, self._weights)
        else:
            await asyncio.gather(*(server.stop() for server in servers))
        if self._places is not None:
            await asyncio.to_thread(self._places.close)
