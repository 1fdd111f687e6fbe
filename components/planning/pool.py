"""The servers of a run on the virtual clock, behind the real merging and routing of requests."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np

from armature.components.inference.client import Completion, GenerationFailure, Message, Sampling, TransientError
from armature.components.inference.merge import RequestMerger
from armature.components.inference.replica import Replica
from armature.components.inference.routing import Router
from armature.components.inference.statistics import PoolStatistics
from armature.components.planning.clock import SerialResource, VirtualLoop
from armature.components.planning.costs import Costs
from armature.components.planning.server import SimulatedServer
from armature.components.planning.workload import PlannedTurn

_NOTHING = np.zeros(0, np.int32)
_ANSWER = Completion(_NOTHING, _NOTHING, np.zeros(0, np.float32), "", "stop", 0, "", 0.0)


class SimulatedPool:
    """Answers as `ServerPool` does, with nothing in the answers. `flow` is the event loop of the flow's process.

    Args:
        resumes_alone: a server that was started again can be given the weights by itself, as from a folder. Else it
            waits for the next sync.
        in_flight_updates: a sync pauses requests, rather than wait for them.

    Attributes:
        failures: of servers.
        lost: times since the last sync that no server had the weights until the run resumed from a checkpoint.
    """

    def __init__(
        self, costs: Costs, servers: int, max_concurrent: int, resumes_alone: bool, in_flight_updates: bool = False
    ) -> None:
        self._costs, self._resumes_alone, self._in_flight_updates = costs, resumes_alone, in_flight_updates
        self._servers = [SimulatedServer(costs.servers) for _ in range(servers)]
        self._replicas = [Replica(str(index), "", ready=True) for index in range(servers)]
        self._router = Router(self._replicas, max_concurrent, PoolStatistics(), Path())
        self._merger = RequestMerger(self._sample)
        self._asked: dict[int, PlannedTurn] = {}
        self.flow = SerialResource()
        self.failures = self.lost = 0

    async def complete(self, shown: str, sampling: Sampling, seed: int, turn: PlannedTurn) -> None:
        """Return when `turn` is answered. Raises GenerationFailure as `ServerPool.complete` does."""
        self._asked[seed] = turn
        await self._merger.complete([{"role": "user", "content": shown}], sampling, seed)

    async def _sample(
        self, messages: Sequence[Message], sampling: Sampling, seed: int, n: int
    ) -> list[Completion | GenerationFailure]:
        turns = [self._asked.pop(seed + member) for member in range(n)]
        async with self._router.admitted():
            await self._router.answered(partial(self._attempt, turns))
        return [_ANSWER] * n

    async def _attempt(self, turns: Sequence[PlannedTurn], replica: Replica) -> None:
        flow, first = self._costs.flow, turns[0]
        await self.flow.use(len(turns) * flow.request_seconds + first.images * flow.image_seconds)
        if not replica.ready:
            raise TransientError("connection_lost", "the server died")
        server = self._servers[int(replica.name)]
        await server.answer(first.new_tokens, first.prompt_tokens, [turn.completion_tokens for turn in turns])

    async def sync(self) -> None:
        """Give all servers new weights, once no request is in flight, or while all are paused."""
        async with self._router.drained(lambda: self._in_flight_updates):
            for server in self._servers:
                server.pause(self._costs.sync_seconds)
            await asyncio.sleep(self._costs.sync_seconds)
            for replica in self._replicas:
                replica.ready, replica.waits = replica.ready or replica.waits, False
        await self._router.notify()

    def work(self, now: float) -> tuple[float, float]:
        """Until `now`: the seconds that servers were busy, added up, and those of all sequences that they decoded."""
        for server in self._servers:
            server.advance(now)
        return sum(server.busy for server in self._servers), sum(server.decoded for server in self._servers)

    def fail(self, mean: float, loop: VirtualLoop, random: np.random.Generator) -> None:
        """Have each server die every `mean` seconds, and come back."""
        self._failing = [loop.create_task(self._fail(index, mean, random)) for index in range(len(self._servers))]

    async def _fail(self, index: int, mean: float, random: np.random.Generator) -> None:
        replica = self._replicas[index]
        while True:
            await asyncio.sleep(float(random.exponential(mean)))
            self.failures += 1
            replica.ready = replica.waits = False
            self._servers[index].die()
            await asyncio.sleep(self._costs.failures.server_restart_seconds)
            others = any(each.ready for each in self._replicas)
            self.lost += not (self._resumes_alone or others)
            replica.waits = others and not self._resumes_alone
            replica.ready = not replica.waits
            await self._router.notify()
