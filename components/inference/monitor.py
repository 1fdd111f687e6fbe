"""Monitor the servers of a pool: remove a server when it is unhealthy, and bring it back with the current weights."""

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
"""Number of failed attempts in a row after which a server is removed from the pool, even if its health route answers
200."""

MAX_RESTARTS = 3
"""Limit on the restarts of a server in a row without an answered request. Instead of another restart, the server is
given up."""

_WATCH = 1.0
"""Seconds between two checks that a server's process is alive."""
SAY_AFTER = 3.0
"""Seconds without an answer of a joined server after which a warning says what the pool waits for."""

_PAUSE = 2.0
"""Seconds to wait after a restart failed with an OSError, such as too many open files. The wait is this number times
the number of restarts so far."""


@dataclass(frozen=True)
class PoolContext:
    """The parts of a pool that its monitors share.

    Attributes:
        lease: id of the pool's lease on its servers.
        who: description of the run, shown to other runs that wait for a server.
        notify: wakes all tasks that wait for a change of the servers.
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
    """Run the life cycle of one replica until cancelled: start, watch, remove, bring back.

    Attributes:
        leased: set once the pool holds the server's lease, or has found that the server has no leases.
    """

    def __init__(self, pool: PoolContext, replica: Replica) -> None:
        self.pool, self.replica = pool, replica
        self.leased = asyncio.Event()
        self._after: ReplicaMonitor | None = None
        self._keeping: asyncio.Task[None] | None = None

    async def start(self, after: ReplicaMonitor | None = None) -> None:
        """Start or join the server for the first time, or reuse one that is still running.

        Args:
            after: the monitor of a server whose lease must be taken before this one's; see `PoolMonitors.start`.

        Raises:
            ServerError: the server does not come up, or another run holds its lease.
        """
        self._after = after
        reused = self.replica.server is not None and self.replica.server.alive
        try:
            await self._come_up()
        except ServerError as error:
            if not reused:
                raise
            log.warning("%s cannot be reused and is started again: %s", self.replica.name, error)
            await self._start_again()

    async def run(self) -> None:
        """Watch the server that `start` has brought up, and bring it back when it fails, until it is given up."""
        try:
            while not self.replica.given_up:
                await self._trouble()
                await self._take_out()
                await self._bring_back()
        except Exception as error:
            # Give the server up on any error: without a monitor, requests would wait for it forever.
            await self._give_up(ServerError(f"the monitor of {self.replica.name} failed: {error!r}"), error)

    async def close(self) -> None:
        """Release the server's lease."""
        if self._keeping is None:
            return
        self._keeping.cancel()
        await asyncio.gather(self._keeping, return_exceptions=True)
        try:
            async with asyncio.timeout(_WATCH):
                await lease.give_back(self.pool.http, self.replica.endpoint)
        except (httpx.TransportError, ServerError, TimeoutError, OSError) as error:
            log.info("%s: its lease was not released and will expire: %r", self.replica.name, error)

    async def _trouble(self) -> None:
        """Return when the server is dead or unhealthy, has failed too often, or has got the weights of the sync that it
        waited for."""
        replica = self.replica
        while replica.ready or replica.waits:
            try:
                # asyncio.wait_for of Python 3.11 may swallow a cancellation that arrives together with the event.
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
        """Restart or rejoin the server until it is ready or given up."""
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
                    await asyncio.sleep(_PAUSE * replica.restarts)  # such as too many open files: it may pass
            else:
                if replica.ready:
                    log.warning("%s is back with version %d", replica.name, replica.version)

    def _count_restart(self) -> None:
        replica = self.replica
        assert replica.server is not None
        replica.restarts += 1
        if replica.restarts > MAX_RESTARTS:
            raise ServerError(
                f"{replica.name} was started {MAX_RESTARTS} times and never answered a request; the last lines of its "
                f"log:\n{replica.server.tail()}",
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
        """Start or join the server, check its weights, and let requests through. Raises ServerError or OSError."""
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
        """Wait until a sync has loaded weights into the server, then let requests through. If the server is lost before
        that, just return."""
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
            version = UNKNOWN  # it still has the weights of the pool that it was kept from
        else:
            await replica.server.start(folder)
        replica.url, replica.version = replica.server.url, version

    async def _wait_remote(self, timeout: float) -> None:
        clock = asyncio.get_running_loop()
        began, warned = clock.time(), False
        while reason := await fault(self.pool.http, self.replica.endpoint):
            waited = clock.time() - began
            if waited > SAY_AFTER and not warned:
                warned = True
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
        self.replica.version = UNKNOWN  # its user may have restarted it with other weights

    async def _take_lease(self) -> None:
        """Take the server's lease. Raises ServerError if another run holds it."""
        replica, pool = self.replica, self.pool
        if self._after is not None:
            await self._after.leased.wait()
        replica.lease = pool.lease
        if not await lease.take(pool.http, replica.endpoint, pool.who, pool.machine.limits.lease_timeout):
            replica.lease = ""
            if replica.server is None:
                log.warning(
                    "%s runs without armature_served.require_key and so has no lease: another run may change its "
                    "weights, which is noticed only if the log-probs of a fixed prompt differ",
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
                # Requests will show whether the server is gone.
                log.info("%s: its lease could not be renewed: %r", replica.name, error)
            except ServerError as error:
                log.warning("%s: %s", replica.name, error)
                replica.mark_suspect()

    async def _admit(self) -> None:
        """Load the current weights into the server if it has others, check it, and let requests through. If a sync is
        changing weights, wait for its end first."""
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
    """The monitors of a pool's servers."""

    def __init__(self, pool: PoolContext, replicas: Sequence[Replica]) -> None:
        self._monitors = [ReplicaMonitor(pool, replica) for replica in replicas]
        self._watching: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Start or join every server. Raises ServerError if one does not come up or another run holds its lease.

        All runs take leases in the order of the servers' URLs, so that two runs cannot wait for each other's servers.
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
        """End the monitors and release the leases."""
        for task in self._watching:
            task.cancel()
        await asyncio.gather(*self._watching, return_exceptions=True)
        await asyncio.gather(*(monitor.close() for monitor in self._monitors))
