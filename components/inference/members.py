"""The servers of a pool, each with its monitor. They come and go with `machine.endpoints_file`, or as requests wait."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path

from armature.components.contracts.errors import ConfigurationError
from armature.components.inference.autoscaling import Autoscaler
from armature.components.inference.endpoints_file import read_endpoints
from armature.components.inference.monitor import PoolContext, ReplicaMonitor
from armature.components.inference.replica import Replica

log = logging.getLogger(__name__)

READ_EVERY = 1.0
"""Seconds between two looks at `machine.endpoints_file`, or at the requests in flight."""


@dataclass(frozen=True)
class ServerScaling:
    """What starts and stops servers of our own: `make` makes the replica with an index, its server not started yet."""

    autoscaler: Autoscaler
    in_flight: Callable[[], int]
    make: Callable[[int], Replica]


class PoolMembers:
    """
    Args:
        replicas: those of the pool at first; the list is kept up to date.
        api_key: of servers that join.
        scaling: what starts and stops servers as requests want them, if anything does.
    """

    def __init__(
        self, pool: PoolContext, replicas: list[Replica], api_key: str, scaling: ServerScaling | None = None
    ) -> None:
        self._pool, self._replicas, self._api_key, self._scaling = pool, replicas, api_key, scaling
        self._monitors = {replica.name: ReplicaMonitor(pool, replica) for replica in replicas}
        self._watching: dict[str, asyncio.Task[None]] = {}
        self._leaving: dict[str, asyncio.Task[None]] = {}
        self._following: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Start or join every server. Raises ServerError if one of them does not come up, or another run has it.

        Leases are taken in the order of the servers' URLs, by all runs: none has one that another waits for while it
        waits for one of the other's.
        """
        ordered = sorted(self._monitors.values(), key=lambda monitor: monitor.replica.url)
        try:
            async with asyncio.TaskGroup() as group:
                for before, monitor in zip([None, *ordered], ordered, strict=False):
                    group.create_task(monitor.start(before))
        except BaseExceptionGroup as error:
            raise error.exceptions[0] from None
        self._watching = {name: asyncio.create_task(monitor.run()) for name, monitor in self._monitors.items()}
        if file := self._pool.machine.endpoints_file:
            self._following = [asyncio.create_task(_loud(self._follow(file)))]
        elif self._scaling is not None:
            self._following = [asyncio.create_task(_loud(self._scale(self._scaling)))]

    async def close(self) -> None:
        """End the monitors, and let others have the servers."""
        await _cancel(*self._following)
        await _cancel(*self._leaving.values(), *self._watching.values())
        await asyncio.gather(*(monitor.close() for monitor in self._monitors.values()))

    async def _follow(self, file: Path) -> None:
        said = ""
        while True:
            await asyncio.sleep(READ_EVERY)
            try:
                listed = await asyncio.to_thread(read_endpoints, file)
            except ConfigurationError as error:  # it may be half written
                if str(error) != said:
                    said = str(error)
                    log.warning("the pool keeps its servers: %s", said)
                continue
            said = ""
            for name in self._monitors.keys() - set(listed) - self._leaving.keys():
                self._begin_to_leave(name)
            for url in listed:
                if url not in self._monitors:
                    self._join(Replica(url, self._api_key, url=url))

    async def _scale(self, scaling: ServerScaling) -> None:
        autoscaler, clock = scaling.autoscaler, asyncio.get_running_loop()
        while True:
            await asyncio.sleep(READ_EVERY)
            here = [replica for replica in self._replicas if replica.name not in self._leaving]
            further = here[autoscaler.least :]
            for replica in further:
                if replica.given_up:
                    autoscaler.most = len(here) - 1
                    log.warning("%s cannot be started: the pool gets no more than %d", replica.name, autoscaler.most)
                    self._begin_to_leave(replica.name)
            if not all(replica.ready for replica in further):
                continue
            in_flight = scaling.in_flight()
            change = autoscaler.change(clock.time(), in_flight, len(here))
            if change:
                log.warning("%d requests in flight, %d of the pool's servers", in_flight, len(here))
            if change > 0:
                indices = {replica.server.index for replica in self._replicas if replica.server}
                self._join(scaling.make(min(set(range(len(indices) + 1)) - indices)))
            elif change < 0:
                self._begin_to_leave(further[-1].name)

    def _join(self, replica: Replica) -> None:
        name = replica.name
        log.warning("%s joins the pool", name)
        self._replicas.append(replica)
        self._monitors[name] = ReplicaMonitor(self._pool, replica)
        self._watching[name] = asyncio.create_task(self._monitors[name].run(up=False))
        self._pool.statistics.joined += 1

    def _begin_to_leave(self, name: str) -> None:
        self._leaving[name] = asyncio.create_task(_loud(self._leave(name)))

    async def _leave(self, name: str) -> None:
        """Ask the server nothing more; once it has answered, let others have it, or stop one of our own."""
        (replica,) = (each for each in self._replicas if each.name == name)
        await _cancel(self._watching.pop(name))
        async with self._pool.weights.changing:  # a sync that has begun still reaches it
            replica.ready = replica.waits = False
        while replica.outstanding:
            await asyncio.sleep(0.1)
        await self._monitors[name].close()
        if replica.server is not None:
            await replica.server.stop()
        self._replicas.remove(replica)
        del self._monitors[name], self._leaving[name]
        self._pool.statistics.left += 1
        log.warning("%s has left the pool", name)
        await self._pool.notify()


async def _loud(work: Coroutine[None, None, None]) -> None:
    try:
        await work
    except Exception:
        log.exception("the pool's servers no longer come and go")
        raise


async def _cancel(*tasks: asyncio.Task[None]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
