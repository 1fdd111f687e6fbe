"""Servers of a pool that other processes ask directly, while the pool starts, watches and updates them."""

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


@dataclass(frozen=True)
class ServerAccess:
    """How to ask a server that holds version `version`, which it calls `model` and its answers say by `weights_id`: see
    `Replica`."""

    name: str
    url: str
    api_key: str
    lease: str
    version: int
    model: str
    weights_id: str


@dataclass(frozen=True)
class SuspectServer:
    """A server that failed an attempt, for `reason`; `weights_id` is the one that it was lent with."""

    name: str
    weights_id: str
    reason: str


def server_access(replica: Replica) -> ServerAccess:
    """
    Raises:
        ConfigurationError: nobody but its pool can know which weights it answers with.
    """
    if not replica.says_weights:
        raise ConfigurationError(
            "this server does not say which weights its answers are of, so no other process may ask it",
            code="weights_mark_missing",
            where=f"machine.workers.rollouts, {replica.name}",
            remedy="start it by `armature serve`, or with --middleware armature_served.require_key.RequireKey",
        )
    return ServerAccess(
        replica.name, replica.url, replica.api_key, replica.lease, replica.version, replica.model, replica.weights_id
    )


class DirectServers:
    """What asks servers that were lent. It gives up one that is gone: when all are, requests raise ServerError.

    Attributes:
        suspects: servers that their pool should look at, by name.
        requests: asks them; see `PoolRequests`.
    """

    def __init__(self, lent: Sequence[ServerAccess], limits: AnswerLimits, max_concurrent: int, timeout: float) -> None:
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
            for each in lent
        ]
        router = Router(replicas, max_concurrent, PoolStatistics(), Path())
        self.requests = PoolRequests(router, limits, timeout, _check_answer, self._failed)

    def _failed(self, replica: Replica, error: TransientError) -> None:
        if replica.given_up:
            return
        self.suspects[replica.name] = SuspectServer(replica.name, replica.weights_id, error.reason)
        often = error.reason == "connection_lost" and replica.failures + 1 >= EJECT_AFTER
        if error.reason == OTHER_WEIGHTS or often:
            replica.ready, replica.given_up = False, ServerError(error.detail, where=replica.url)


async def _check_answer(replica: Replica, weights_id: str, answered: str) -> None:
    if answered != weights_id:
        raise TransientError(OTHER_WEIGHTS, f"{replica.name} was started again, or others changed its weights")
