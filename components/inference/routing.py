"""Which server of a pool answers a request, how often it is tried, and when none may begin."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from armature.components.contracts.errors import ServerError, WeightSyncError
from armature.components.inference.client import Completion, GenerationFailure, TransientError
from armature.components.inference.replica import Replica

# What a pool counts.


@dataclass
class PoolStatistics:
    """Counts since the pool was made. `failures` is by reason; every sample asked for is in exactly one count."""

    began: float = field(default_factory=time.monotonic)
    requests: int = 0
    completions: int = 0
    failures: Counter[str] = field(default_factory=Counter)
    retries: int = 0
    timeouts: int = 0
    ejections: int = 0
    restarts: int = 0
    stragglers: int = 0
    """Shards of rollouts that were taken from workers because they were late."""
    continued: int = 0
    """Samples whose server got new weights between their request and their answer."""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    request_seconds: float = 0.0
    """Sum over requests of the time from admission to answer."""

    def answered(self, results: Sequence[Completion | GenerationFailure], seconds: float) -> None:
        self.requests += 1
        self.request_seconds += seconds
        for result in results:
            if isinstance(result, GenerationFailure):
                self.failures[result.reason] += 1
            else:
                self.completions += 1
                self.prompt_tokens += result.prompt_token_ids.size
                self.completion_tokens += result.token_ids.size

    def failed(self, reason: str, samples: int) -> None:
        self.requests += 1
        self.failures[reason] += samples

    def counts(self) -> dict[str, int]:
        """All but the failures, by name."""
        return {name: value for name, value in vars(self).items() if isinstance(value, int)}

    def snapshot(self) -> dict[str, float]:
        """Flat numbers for a log: counts, failures by reason, completion tokens per second of the pool's life."""
        numbers: dict[str, float] = dict(self.counts())
        numbers |= {f"failures/{reason}": count for reason, count in self.failures.items()}
        numbers["tokens_per_second"] = self.completion_tokens / max(time.monotonic() - self.began, 1e-9)
        numbers["mean_request_seconds"] = self.request_seconds / max(self.requests, 1)
        return numbers


log = logging.getLogger(__name__)

MAX_ATTEMPTS = 4
"""Times that one request is tried before it is a failure."""

T = TypeVar("T")


class Router:
    """Sends each request to the least loaded of `replicas`, at most `max_concurrent` at once, none during `drained`.

    It reads no clock but the event loop's. What an attempt is, its caller says.

    Attributes:
        in_flight: requests that were admitted and have no answer yet.
        direct: those of them that others send.
        broken: what every request raises from now on.
        closed: nobody waits for answers any more.
    """

    def __init__(
        self, replicas: Sequence[Replica], max_concurrent: int, statistics: PoolStatistics, log_folder: Path
    ) -> None:
        self.replicas, self.statistics, self.log_folder = replicas, statistics, log_folder
        self.in_flight = self.direct = 0
        self.broken: WeightSyncError | None = None
        self.closed = False
        self._slots = asyncio.Semaphore(max_concurrent)
        self._changed = asyncio.Condition()
        self._draining = False

    @asynccontextmanager
    async def admitted(self, requests: int = 1, *, direct: bool = False) -> AsyncIterator[None]:
        """Counts as so many requests in flight; waits for a slot, and while weights are being changed.

        Raises:
            WeightSyncError: an earlier sync failed.
        """
        async with self._slots:
            async with self._changed:
                await self._changed.wait_for(lambda: not self._draining or self.broken is not None)
                if self.broken is not None:
                    raise self.broken
                self.in_flight += requests
                self.direct += requests * direct
            try:
                yield
            finally:
                self.in_flight -= requests
                self.direct -= requests * direct
                await self.notify()

    async def answered(self, attempt: Callable[[Replica], Awaitable[T]]) -> T:
        """What `attempt` gives for a replica; another is tried where it raises `TransientError`.

        Raises:
            GenerationFailure: `MAX_ATTEMPTS` failed.
            WeightSyncError: a sync failed meanwhile.
            ServerError: no server is left, or the pool was closed.
        """
        tried: set[str] = set()
        last = TransientError("no_attempt", "")
        for number in range(MAX_ATTEMPTS):
            if number:
                self.statistics.retries += 1
                await asyncio.sleep(0.1 * 2**number)
            if self.broken is not None:
                raise self.broken
            replica = await self._take(tried)
            try:
                answer = await attempt(replica)
            except TransientError as error:
                if self.closed:
                    raise ServerError("the pool was closed before a server answered", code="pool_closed") from error
                last = error
                tried.add(replica.name)
                replica.failures += 1
                replica.suspect.set()
                self.statistics.timeouts += error.reason == "generation_timeout"
                log.warning("attempt %d of %d failed: %s", number + 1, MAX_ATTEMPTS, error)
                continue
            finally:
                replica.outstanding -= 1
                await self.notify()
            replica.failures = replica.restarts = 0
            return answer
        raise GenerationFailure(
            f"{MAX_ATTEMPTS} attempts failed, the last one: {last.detail}",
            reason=last.reason,
            where=", ".join(sorted(tried)),
            remedy="read the servers' logs in " + str(self.log_folder),
        ) from last

    async def ready(self) -> list[Replica]:
        """Those that may be asked; waits for any.

        Raises:
            ServerError: no server is left, or those that are wait for the next sync, which waits for this request.
        """
        async with self._changed:
            while not (ready := [replica for replica in self.replicas if replica.ready]):
                self._refuse_none_left()
                waiting = [replica.name for replica in self.replicas if replica.waits or replica.given_up]
                if waiting and len(waiting) == len(self.replicas):
                    raise ServerError(
                        "no server is left that has the current weights: those that came up later get the next ones",
                        code="no_current_server",
                        where=", ".join(waiting),
                        remedy="run the same command again: it resumes from the last checkpoint",
                    )
                await self._changed.wait()
            return ready

    async def reachable(self) -> None:
        """Return once a server is up that can be given weights.

        Raises:
            ServerError: no server is left.
        """
        async with self._changed:
            while not any(replica.ready or replica.waits for replica in self.replicas):
                self._refuse_none_left()
                await self._changed.wait()

    def _refuse_none_left(self) -> None:
        reasons = [replica.given_up for replica in self.replicas if replica.given_up]
        if reasons and len(reasons) == len(self.replicas):
            raise ServerError(
                f"no server is left; the last one: {reasons[-1]}", code="no_server_left", where=str(self.log_folder)
            ) from reasons[-1]

    async def _take(self, tried: set[str]) -> Replica:
        """The ready server with the fewest requests, one not yet tried if there is one; waits for any."""
        best = min(await self.ready(), key=lambda replica: (replica.name in tried, replica.outstanding))
        best.outstanding += 1
        return best

    async def notify(self) -> None:
        """Wake whatever waits for a change of the servers or of the requests in flight."""
        async with self._changed:
            self._changed.notify_all()

    @asynccontextmanager
    async def drained(self, direct_only: Callable[[], bool] = lambda: False) -> AsyncIterator[None]:
        """Wait until no request is in flight, and hold back new ones inside the block.

        Where `direct_only()` is true, wait only for requests that other processes send directly to the servers.
        """
        self._draining = True
        try:
            async with self._changed:
                await self._changed.wait_for(lambda: (self.direct if direct_only() else self.in_flight) == 0)
            yield
        finally:
            self._draining = False
