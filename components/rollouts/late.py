"""Shards of a step: which wait for a worker, which are played since when, and which are late."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Generic, TypeVar

ShardT = TypeVar("ShardT")
WorkerT = TypeVar("WorkerT")


class ShardQueue(Generic[ShardT, WorkerT]):
    """All calls have to come from one event loop.

    Attributes:
        late: shards that were taken from a worker; each is taken once, for it may just be long.
    """

    def __init__(self, shards: Sequence[ShardT]) -> None:
        self._waiting = deque((shard, 1) for shard in shards)
        self._left, self._idle = len(shards), 0
        self._changed = asyncio.Condition()
        self._played = dict[WorkerT, tuple[ShardT, float]]()
        self.late = list[ShardT]()

    async def take(self) -> tuple[ShardT, int] | None:
        """A shard and how often it was begun with this time; waits for one. None: all are made."""
        async with self._changed:
            self._idle += 1
            try:
                await self._changed.wait_for(lambda: self._waiting or not self._left)
            finally:
                self._idle -= 1
            return self._waiting.popleft() if self._waiting else None

    async def put_back(self, shard: ShardT, attempt: int) -> None:
        """To be begun once more, as attempt number `attempt`."""
        async with self._changed:
            self._waiting.append((shard, attempt))
            self._changed.notify_all()

    async def made(self) -> None:
        """One of the shards is there."""
        async with self._changed:
            self._left -= 1
            self._changed.notify_all()

    @contextmanager
    def played(self, shard: ShardT, worker: WorkerT, now: float) -> Iterator[None]:
        """Within it, `worker` plays `shard`."""
        self._played[worker] = shard, now
        try:
            yield
        finally:
            del self._played[worker]

    def overdue(self, now: float, awaited: float, timeout: float) -> Iterator[tuple[ShardT, WorkerT]]:
        """What was played, and waited for since `awaited`, for `timeout` seconds, the longest first; no more than there
        are workers without work. What it gives is `late` from then on."""
        overdue = [
            (begun, worker, shard)
            for worker, (shard, begun) in self._played.items()
            if shard not in self.late and now - max(begun, awaited) >= timeout
        ]
        for _, worker, shard in sorted(overdue, key=lambda each: each[0])[: self._idle]:
            self.late.append(shard)
            yield shard, worker
