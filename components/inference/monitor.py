"""Watches the servers of a pool: takes one out when it is unhealthy, and brings it back with the current weights."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial

import httpx

from armature.components.contracts.errors import ArmatureError, ServerError
from armature.components.contracts.machine import Machine
from armature.components.inference import lease
from armature.components.inference.determinism import Repeatability
from armature.components.inference.replica import UNKNOWN, Replica
from armature.components.inference.routing import PoolStatistics
from armature.components.inference.server import fault
from armature.components.inference.sync import ServedWeights

log = logging.getLogger(__name__)

EJECT_AFTER = 3
"""Attempts in a row that may fail on a server that still says it is healthy."""

MAX_RESTARTS = 3
"""Starts in a row without one answered request before a server is given up."""

_WATCH = 1.0
SAY_AFTER = 3.0
"""Seconds without an answer of a server that is joined until it is said what is waited for."""

_PAUSE = 2.0
"""Seconds, times the attempts so far, after a start failed for want of something that time may bring."""


@dataclass(frozen=True)
class PoolContext:
    """What all monitors of a pool share with it.

    `lease` is the id under which the pool has its servers, `who` its run in words; `notify` wakes whatever waits for a
    change of the servers.
    """

    http: httpx.AsyncClient
    machine: Machine
    weights: ServedWeights
    repeatability: Repeatability
    statistics: PoolStatistics
    lease: str
    who: str
    notify: Callable[[], Awaitable[None]]


class ReplicaMonitor:
    """The life of one replica: start, watch, take out, bring back, and so on until cancelled.

    `leased` is set once the pool has had its server for itself.
    """

    def __init__(self, pool: PoolContext, replica: Replica) -> None:
        self.pool, self.replica = pool, replica
        self.leased = asyncio.Event()
        self._after: ReplicaMonitor | None = None
        self._keeping: asyncio.Task[None] | None = None

    async def start(self, after: ReplicaMonitor | None = None) -> None:
        """Start or join the server for the first time, or take one that is alive; `after` takes its own before.

        Raises:
            ServerError: it does not come up, or another run has it.
        """
        self._after = after
        kept = self.replica.server is not None and self.replica.server.alive
        try:
            await self._come_up()
        except ServerError as error:
            if not kept:
                raise
            log.warning("%s cannot be used again, and is started: %s", self.replica.name, error)
            await self._start_again()

    async def run(self) -> None:
        """Watch the server that `start` has brought up, until it is given up."""
        try:
            while not self.replica.given_up:
                await self._trouble()
                await self._take_out()
                await self._bring_back()
        except Exception as error:
            # Whatever it is: those who wait for this server would wait for ever.
            await self._give_up(ServerError(f"the monitor of {self.replica.name} failed: {error!r}"), error)

    async def close(self) -> None:
        """Let others have the server."""
        if self._keeping is None:
            return
        self._keeping.cancel()
        await asyncio.gather(self._keeping, return_exceptions=True)
        try:
            async with asyncio.timeout(_WATCH):
                await lease.give_back(self.pool.http, self.replica.endpoint)
        except (httpx.TransportError, ServerError, TimeoutError, OSError) as error:
            log.info("%s: its lease ends by itself: %r", self.replica.name, error)

    async def _trouble(self) -> None:
        """Return when the server is dead, unhealthy, or has failed too often, or no longer waits for a sync."""
        replica = self.replica
        while replica.ready or replica.waits:
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
        try:
            return not await fault(self.pool.http, self.replica.endpoint)
        except ServerError as error:
            log.warning("%s: %s", self.replica.name, error)
            return False

    async def _take_out(self) -> None:
        self.replica.ready = self.replica.waits = False
        self.pool.statistics.ejections += 1
        log.warning("%s is removed from the pool", self.replica.name)
        await self.pool.notify()

    async def _bring_back(self) -> None:
        """Return when the server is back, or given up."""
        replica = self.replica
        while not replica.ready and replica.given_up is None:
            try:
                if replica.server is not None:
                    self._count_restart()
                await self._start_again()
            except (ArmatureError, OSError) as error:
                log.error("%s: %s", replica.name, error)
                if replica.server is None or replica.restarts > MAX_RESTARTS:
                    await self._give_up(ServerError(f"{replica.name} cannot be started: {error!r}"), error)
                elif isinstance(error, OSError):
                    await asyncio.sleep(_PAUSE * replica.restarts)  # out of file handles, or the like
            else:
                if replica.ready:
                    log.warning("%s is back with version %d", replica.name, replica.version)

    def _count_restart(self) -> None:
        replica = self.replica
        assert replica.server is not None
        replica.restarts += 1
        if replica.restarts > MAX_RESTARTS:
            raise ServerError(
                f"{replica.name} was started {MAX_RESTARTS} times and never answered a request; its "
                f"last lines:\n{replica.server.tail()}",
                code="server_never_answered",
                where=str(replica.server.log),
            )
        self.pool.statistics.restarts += 1

    async def _give_up(self, failure: ServerError, cause: Exception) -> None:
        self.replica.ready = self.replica.waits = False
        self.replica.given_up = cause if isinstance(cause, ArmatureError) else failure
        self.replica.given_up.__cause__ = None if isinstance(cause, ArmatureError) else cause
        log.error("%s is given up: %s", self.replica.name, self.replica.given_up)
        await self.pool.notify()

    async def _come_up(self) -> None:
        """Start or join the server, and let requests through. Raises ServerError, OSError."""
        if self.replica.server is not None:
            await self._start_local()
        else:
            await self._wait_remote(self.pool.machine.limits.ready_timeout)
        self.replica.joined += 1
        try:
            await self._take_lease()
            await self._admit()
            if self.replica.waits:
                await self._wait_for_sync()
        except httpx.TransportError as error:
            name, url = self.replica.name, self.replica.url
            raise ServerError(
                f"{name} disconnected while joining: {error!r}", code="server_disconnected", where=url
            ) from error

    async def _wait_for_sync(self) -> None:
        """Let requests through once the server was given weights. Return as well if it is lost before."""
        await self._trouble()
        self.replica.waits = False
        if self.replica.version == self.pool.weights.version:
            await self._admit()

    async def _start_again(self) -> None:
        if self.replica.server is not None:
            await self.replica.server.stop()
        await self._come_up()

    async def _start_local(self) -> None:
        replica, pool = self.replica, self.pool
        assert replica.server is not None
        folder, version = pool.weights.folder, pool.weights.folder_version
        if replica.server.alive:
            version = UNKNOWN  # kept from another pool, with the weights of that
        else:
            await replica.server.start(folder)
        replica.url, replica.version = replica.server.url, version

    async def _wait_remote(self, timeout: float) -> None:
        clock = asyncio.get_running_loop()
        began, said = clock.time(), False
        while reason := await fault(self.pool.http, self.replica.endpoint):
            waited = clock.time() - began
            if waited > SAY_AFTER and not said:
                said = True
                log.warning(
                    "waiting for the server at %s, at most %g s (%s); `armature serve MODEL` starts one",
                    self.replica.url,
                    timeout,
                    reason,
                )
            if waited > timeout:
                raise ServerError(
                    f"no server answers within {timeout:g} s: {reason}",
                    code="server_not_ready",
                    where=self.replica.url,
                    remedy="start it (`armature serve MODEL`), or correct machine.servers.endpoints",
                )
            await asyncio.sleep(1.0)
        self.replica.version = UNKNOWN  # it may have been started again with whatever weights it was given then

    async def _take_lease(self) -> None:
        """Have the server for this pool alone. Raises ServerError if another run has it."""
        replica, pool = self.replica, self.pool
        if self._after is not None:
            await self._after.leased.wait()
        replica.lease = pool.lease
        if not await lease.take(pool.http, replica.endpoint, pool.who, pool.machine.limits.lease_timeout):
            replica.lease = ""
            if replica.server is None:
                log.warning(
                    "%s runs without armature_served.require_key: no run can have it for itself. Weights of another "
                    "run are found if a prompt's log-probs tell them apart",
                    replica.name,
                )
        elif self._keeping is None:
            self._keeping = asyncio.create_task(self._keep_lease())
        self.leased.set()

    async def _keep_lease(self) -> None:
        replica, pool = self.replica, self.pool
        while True:
            await asyncio.sleep(lease.KEEP_EVERY)
            try:
                async with asyncio.timeout(lease.SECONDS):
                    await lease.keep(pool.http, replica.endpoint, pool.who)
            except (httpx.TransportError, TimeoutError, OSError) as error:
                log.info("%s: its lease could not be kept: %r", replica.name, error)  # requests find out what is wrong
            except ServerError as error:
                log.warning("%s: %s", replica.name, error)
                replica.mark_suspect()

    async def _admit(self) -> None:
        """Let requests through, once the server holds the current weights. Not while weights are changing."""
        replica, pool = self.replica, self.pool
        async with pool.weights.changing:
            replica.failures = 0
            replica.suspect.clear()
            try:
                async with asyncio.timeout(pool.machine.limits.sync_timeout):
                    ready = await pool.weights.make_current(pool.http, replica)
                    if ready:
                        again = partial(pool.weights.load_again, pool.http, replica)
                        await pool.repeatability.check(pool.http, replica, again)
                    replica.ready = ready
            except TimeoutError as error:
                raise ServerError(
                    f"{replica.name} did not take the weights in {pool.machine.limits.sync_timeout:g} s",
                    code="server_sync_timeout",
                    where=replica.url,
                ) from error
        await pool.notify()


class PoolMonitors:
    """The monitors of all servers of a pool."""

    def __init__(self, pool: PoolContext, replicas: Sequence[Replica]) -> None:
        self._monitors = [ReplicaMonitor(pool, replica) for replica in replicas]
        self._watching: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Start or join every server. Raises ServerError if one of them does not come up, or another run has it.

        All runs take leases in the order of the servers' URLs. So no run has a server that another one waits for while
        it waits for a server of the other.
        """
        ordered = sorted(self._monitors, key=lambda monitor: monitor.replica.url)
        try:
            async with asyncio.TaskGroup() as group:
                for before, monitor in zip([None, *ordered], ordered, strict=False):
                    group.create_task(monitor.start(before))
        except BaseExceptionGroup as error:
            raise error.exceptions[0] from None
        self._watching = [asyncio.create_task(monitor.run()) for monitor in self._monitors]

    async def close(self) -> None:
        """End the monitors, and let others have the servers."""
        for task in self._watching:
            task.cancel()
        await asyncio.gather(*self._watching, return_exceptions=True)
        await asyncio.gather(*(monitor.close() for monitor in self._monitors))
