"""The servers that a pool starts itself, on this machine or on a cluster, and their reuse by the next pool."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from armature.components.contracts.machine import Machine
from armature.components.inference.command import ServedAdapters
from armature.components.inference.host import PlacedHost
from armature.components.inference.replica import Replica
from armature.components.inference.server import VllmServer
from armature.components.inference.settings import ServerSettings
from armature.components.machine.workers.placed import PlacementBundles

# --- Servers that stay up between the stages of a flow, for the next stage that needs the same servers ---

_NOT_SERVED = frozenset({"manifest.json", "generation_config.json"})
_PADDING = frozenset(
    {"padding", "truncation", "max_length", "pad_to_multiple_of", "pad_token_type_id", "is_local", "local_files_only"}
)
"""Keys of a tokenizer's files whose values depend on how the tokenizer was called before it was saved. Servers do not
read them."""


@dataclass(frozen=True)
class _Kept:
    server: VllmServer
    files: Mapping[str, Any]


class KeptServers:
    """Running local servers that no pool uses at the moment. For each server, the contents of the checkpoint files that
    it has read, except the weights, are stored too."""

    def __init__(self) -> None:
        self._kept: list[_Kept] = []

    def take(self, model: Path, settings: ServerSettings, machine: Machine) -> list[VllmServer]:
        """Return running servers for all replicas of a pool. They still have the previous pool's weights.

        If the kept servers were started with other settings or files, end them and return [].
        """
        wanted = (settings, machine, served_files(model))
        equal = [(each.server.settings, each.server.machine, each.files) == wanted for each in self._kept]
        if len(equal) == machine.servers.count and all(equal) and all(each.server.alive for each in self._kept):
            servers = [each.server for each in self._kept]
            self._kept.clear()
            return servers
        self.close()
        return []

    def keep(self, servers: Sequence[VllmServer], model: Path) -> None:
        """Keep servers that were started with `model`, from a pool that ended without an error."""
        files = served_files(model)
        self._kept += [_Kept(server, files) for server in servers]

    def close(self) -> None:
        """End the kept servers."""
        for each in self._kept:
            each.server.end()
        self._kept.clear()


_current: ContextVar[KeptServers | None] = ContextVar("kept servers", default=None)


@contextmanager
def keep_servers() -> Iterator[None]:
    """Inside the block, local servers on CPU outlive the pools that started them.

    Servers on GPUs end with their pool: a flow holds the concurrency limit "gpu" only as long as a stage needs it.
    """
    servers = KeptServers()
    token = _current.set(servers)
    try:
        yield
    finally:
        _current.reset(token)
        servers.close()


def kept_servers(machine: Machine) -> KeptServers | None:
    """Return the servers that a pool on `machine` may reuse; None if its servers start and end with the pool."""
    here = not machine.joins_servers and machine.server_bundle is None
    lasting = here and not machine.servers.gpus and machine.sends_folders
    return _current.get() if lasting else None


def served_files(model: Path) -> dict[str, Any]:
    """Return the contents of the files in a checkpoint folder that a server reads, by file name, without the weights.

    The content of a JSON file is its parsed document; the content of another file is its bytes.
    """
    read: dict[str, Any] = {}
    for file in sorted(model.iterdir()):
        if file.suffix in (".jinja", ".txt", ".model", ".py"):
            read[file.name] = file.read_bytes()
        elif file.suffix == ".json" and not file.name.endswith(".index.json") and file.name not in _NOT_SERVED:
            document = json.loads(file.read_text())
            if file.name.startswith("tokenizer"):
                document = {key: value for key, value in document.items() if key not in _PADDING}
            read[file.name] = document
    return read


class OwnServers:
    """Make, reuse and end the servers of a pool. The arguments mean the same as in `ServerPool`."""

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
        # Servers with adapters are not reused: they keep the base weights that they were started with.
        self._kept = kept_servers(machine) if adapters is None else None
        self._places = (
            PlacementBundles(machine.cluster, machine.server_bundle, machine.servers.count)
            if machine.cluster is not None and machine.server_bundle is not None
            else None
        )

    def replica(self, index: int) -> Replica:
        """Return a replica whose server has not been started yet."""
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
        """Give the replicas the running servers that the previous pool has left, if there are any."""
        if self._kept is None:
            return
        servers = await asyncio.to_thread(self._kept.take, self._weights, self._settings, self._machine)
        for replica, server in zip(replicas, servers, strict=False):
            server.log_folder = self._log_folder
            replica.server, replica.api_key = server, server.api_key

    async def close(self, replicas: Sequence[Replica], keep: bool) -> None:
        """End the servers. With `keep`, leave them running for the next pool instead, if they can be reused and all of
        them are ready."""
        servers = [replica.server for replica in replicas if replica.server]
        if self._kept is not None and keep and all(replica.ready for replica in replicas):
            self._kept.keep(servers, self._weights)
        else:
            await asyncio.gather(*(server.stop() for server in servers))
        if self._places is not None:
            await asyncio.to_thread(self._places.close)
