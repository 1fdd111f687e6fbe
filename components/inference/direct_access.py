"""Direct access of other processes to a pool's servers, while the pool starts, monitors and updates the servers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from armature.components.contracts.errors import ConfigurationError, ServerError
from armature.components.inference.client import OTHER_WEIGHTS, TransientError
from armature.components.inference.monitor import EJECT_AFTER
from armature.components.inference.replica import Replica
from armature.components.inference.requests import AnswerLimits, PoolRequests
from armature.components.inference.routing import PoolStatistics, Router
from armature.components.inference.tool_calls import ToolFormat


@dataclass(frozen=True)
class ServerAccess:
    """Everything that a process needs to send requests to a pool's server. The fields mean the same as in `Replica`."""

    name: str
    url: str
    api_key: str
    lease: str
    version: int
    model: str
    weights_id: str


@dataclass(frozen=True)
class SuspectServer:
    """A server that failed a direct request, for the `reason`. `weights_id` is the one in its `ServerAccess`."""

    name: str
    weights_id: str
    reason: str


def server_access(replica: Replica) -> ServerAccess:
    """Return everything that another process needs to send requests to the server `replica`.

    Raises:
        ConfigurationError: the server's answers have no id of their weights, so only its pool can check them.
    """
    if not replica.says_weights:
        raise ConfigurationError(
            "this server's answers have no id of their weights, so other processes cannot check them",
            code="weights_mark_missing",
            where=f"machine.workers.rollouts, {replica.name}",
            remedy="start it by `armature serve`, or with --middleware armature_served.require_key.RequireKey",
        )
    return ServerAccess(
        replica.name, replica.url, replica.api_key, replica.lease, replica.version, replica.model, replica.weights_id
    )


class DirectServers:
    """A client of servers that another process started. It gives up a server that is gone. Once all servers are gone,
    requests raise ServerError.

    Attributes:
        suspects: servers that their pool should check, by name.
        requests: sends requests to the servers; see `PoolRequests`.
    """

    def __init__(
        self,
        servers: Sequence[ServerAccess],
        limits: AnswerLimits,
        max_concurrent: int,
        timeout: float,
        tool_format: ToolFormat,
    ) -> None:
        self.suspects: dict[str, SuspectServer] = {}
        replicas = [
            Replica(
                each.name,
                each.api_key,
                url=each.url,
                ready=True,
                version=each.version,
                model=each.model,
                weights_id=each.weights_id,
                lease=each.lease,
            )
            for each in servers
        ]
        router = Router(replicas, max_concurrent, PoolStatistics(), Path())
        self.requests = PoolRequests(router, limits, timeout, _check_answer, self._failed, lambda: tool_format)

    def _failed(self, replica: Replica, error: TransientError) -> None:
        if replica.given_up:
            return
        self.suspects[replica.name] = SuspectServer(replica.name, replica.weights_id, error.reason)
        often = error.reason == "connection_lost" and replica.failures + 1 >= EJECT_AFTER
        if error.reason == OTHER_WEIGHTS or often:
            replica.ready, replica.given_up = False, ServerError(error.detail, where=replica.url)


async def _check_answer(replica: Replica, weights_id: str, answered: str) -> None:
    if answered != weights_id:
        raise TransientError(OTHER_WEIGHTS, f"{replica.name} was restarted, or another run changed its weights")
