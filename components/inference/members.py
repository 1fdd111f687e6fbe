"""The servers of a pool, each with its monitor. With `machine.endpoints_file` they come and go."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from pathlib import Path

from components.contracts.errors import ConfigurationError
from components.inference.endpoints_file import read_endpoints
from components.inference.monitor import PoolContext, ReplicaMonitor
from components.inference.replica import Replica

log = logging.getLogger(__name__)

READ_EVERY = 1.0
"""Seconds between two looks at `machine.endpoints_file`."""


class PoolMembers:
    """
    Args:
        replicas: those of the pool at first; the list is kept up to date.
        api_key: of servers that join.
    """

    def __init__(self, pool: PoolContext, replicas: list[Replica], api_key: str) -> None:
        self._pool, self._replicas, self._api_key = pool, replicas, api_key
        self._monitors = {replica.name: ReplicaMonitor(pool, replica) for replica in replicas}
        self._watching: dict[str, asyncio.Task[None]] = {}
        self._leaving: dict[str, asyncio.Task[None]] = {}
        self._following: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Start or join every server. Raises ServerError if one of them does not come up, or another run has it."""
        try:
            async with asyncio.TaskGroup() as group:
                for monitor in self._monitors.values():
                    group.create_task(monitor.start())
        except BaseExceptionGroup as error:
            raise error.exceptions[0] from None
        self._watching = {name: asyncio.create_task(monitor.run()) for name, monitor in self._monitors.items()}
        if file := self._pool.machine.endpoints_file:
            self._following = [asyncio.create_task(_loud(self._follow(file)))]

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
                self._leaving[name] = asyncio.create_task(_loud(self._leave(name)))
            for url in listed:
                if url not in self._monitors:
                    self._join(url)

    def _join(self, url: str) -> None:
        log.warning("%s joins the pool", url)
        replica = Replica(url, self._api_key, url=url)
        self._replicas.append(replica)
        self._monitors[url] = ReplicaMonitor(self._pool, replica)
        self._watching[url] = asyncio.create_task(self._monitors[url].run(up=False))
        self._pool.statistics.joined += 1

    async def _leave(self, name: str) -> None:
        """Ask the server nothing more; once it has answered, let others have it."""
        (replica,) = (each for each in self._replicas if each.name == name)
        await _cancel(self._watching.pop(name))
        async with self._pool.weights.changing:  # a sync that has begun still reaches it
            replica.ready = False
        while replica.outstanding:
            await asyncio.sleep(0.1)
        await self._monitors[name].close()
        self._replicas.remove(replica)
        del self._monitors[name], self._leaving[name]
        self._pool.statistics.left += 1
        log.warning("%s has left the pool", name)
        await self._pool.notify()


async def _loud(work: Coroutine[None, None, None]) -> None:
    try:
        await work
    except Exception:
        log.exception("the pool's servers no longer follow machine.endpoints_file")
        raise


async def _cancel(*tasks: asyncio.Task[None]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
