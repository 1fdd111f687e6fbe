"""Watches one server of the pool: takes it out when it is ill, and brings it back with the current weights."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

import httpx

from components.contracts.errors import ArmatureError, ServerError
from components.inference.replica import Replica
from components.inference.server import serves

if TYPE_CHECKING:
    from components.inference.pool import ServerPool

log = logging.getLogger(__name__)

EJECT_AFTER = 3
"""Attempts in a row that may fail on a server that still says it is healthy."""

MAX_RESTARTS = 3
"""Starts in a row without one answered request before a server is given up."""

_WATCH = 1.0
_HEALTH_TIMEOUT = 10.0


class Keeper:
    """The life of one replica: start, watch, take out, bring back, and so on until cancelled."""

    def __init__(self, pool: ServerPool, replica: Replica) -> None:
        self.pool, self.replica = pool, replica

    async def start(self) -> None:
        """Start or join the server for the first time. Raises ServerError."""
        if self.replica.server is not None:
            await self._start_local()
        else:
            await self._wait_remote(self.pool.machine.ready_timeout)
        await self._admit()

    async def run(self) -> None:
        while True:
            await self._trouble()
            await self._take_out()
            if not await self._bring_back():
                return

    async def _trouble(self) -> None:
        """Return when the server is dead, ill, or has failed too often."""
        replica = self.replica
        while replica.ready:
            try:
                # Not wait_for: in Python 3.11 it may swallow a cancellation that comes with the event.
                async with asyncio.timeout(_WATCH):
                    await replica.suspect.wait()
            except TimeoutError:
                if replica.server is None or replica.server.alive:
                    continue
                return
            replica.suspect.clear()
            if replica.failures >= EJECT_AFTER or not await self._healthy():
                return

    async def _healthy(self) -> bool:
        if self.replica.server is not None and not self.replica.server.alive:
            return False
        async with httpx.AsyncClient(
            headers=self.replica.endpoint.headers, timeout=_HEALTH_TIMEOUT, trust_env=False
        ) as http:
            return await serves(http, self.replica.url)

    async def _take_out(self) -> None:
        self.replica.ready = False
        self.pool.statistics.ejections += 1
        log.warning("%s is taken out of the pool", self.replica.name)
        await self.pool.notify()

    async def _bring_back(self) -> bool:
        """Whether the server is back; False: it is given up."""
        replica = self.replica
        while True:
            try:
                if replica.server is not None:
                    replica.restarts += 1
                    if replica.restarts > MAX_RESTARTS:
                        raise ServerError(
                            f"{replica.name} was started {MAX_RESTARTS} times and never answered a request; its "
                            f"last lines:\n{replica.server.tail()}",
                            where=str(replica.server.log),
                        )
                    self.pool.statistics.restarts += 1
                    await self._start_local()
                else:
                    await self._wait_remote(self.pool.machine.ready_timeout)
                await self._admit()
            except ArmatureError as error:
                log.error("%s: %s", replica.name, error)
                if replica.server is None or replica.restarts >= MAX_RESTARTS:
                    replica.given_up = error
                    await self.pool.notify()
                    return False
            else:
                if replica.ready:
                    log.warning("%s is back with version %d", replica.name, replica.version)
                    return True

    async def _start_local(self) -> None:
        replica, pool = self.replica, self.pool
        assert replica.server is not None
        folder, version = pool.weights.folder, pool.weights.folder_version
        await replica.server.start(folder)
        replica.url, replica.version = replica.server.url, version

    async def _wait_remote(self, timeout: float) -> None:
        deadline = asyncio.get_running_loop().time() + timeout
        while not await self._healthy():
            if asyncio.get_running_loop().time() > deadline:
                raise ServerError(
                    f"no server answers as 'policy' within {timeout:g} s",
                    where=self.replica.url,
                    remedy="start it with --served-model-name policy; put its key into VLLM_API_KEY",
                )
            await asyncio.sleep(1.0)
        self.replica.version = -1  # it may have been started again with whatever weights it was given then

    async def _admit(self) -> None:
        """Let requests through, once the server holds the current weights. Not while weights are changing."""
        replica, pool = self.replica, self.pool
        async with pool.weights.changing:
            replica.failures = 0
            replica.suspect.clear()
            try:
                replica.ready = await pool.weights.make_current(pool.http, replica)
            except httpx.TransportError as error:
                raise ServerError(f"{replica.name} went away as it joined: {error!r}", where=replica.url) from error
        await pool.notify()
