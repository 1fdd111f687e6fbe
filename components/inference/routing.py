"""Route requests to the servers of a pool: load balancing, retries, and draining before weights change."""

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


@dataclass
class PoolStatistics:
    """Counts since the pool was made.

    Every requested sample is counted once, in `completions` or, by reason, in `failures`.
    """

    began: float = field(default_factory=time.monotonic)
    requests: int = 0
    completions: int = 0
    failures: Counter[str] = field(default_factory=Counter)
    retries: int = 0
    timeouts: int = 0
    ejections: int = 0
    restarts: int = 0
    stragglers: int = 0
    """Number of shards of rollouts that another worker collected again because the first worker was late."""
    continued: int = 0
    """Number of samples whose server got new weights between the request and the answer."""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    request_seconds: float = 0.0
    """Seconds from the admission of a request to its answer, summed over all requests."""

    def answered(self, results: Sequence[Completion | GenerationFailure], seconds: float) -> None:
        """Count a request that returned `results`."""
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
        """Count a request for `samples` samples that failed as a whole."""
        self.requests += 1
        self.failures[reason] += samples

    def counts(self) -> dict[str, int]:
        """Return the counts by name. Failures and seconds are not included."""
        return {name: value for name, value in vars(self).items() if isinstance(value, int)}

    def snapshot(self) -> dict[str, float]:
        """Return numbers for a log, by name: the counts, the failures of each reason, the completion tokens per second
        since the pool was made, and the mean seconds per request."""
        numbers: dict[str, float] = dict(self.counts())
        numbers |= {f"failures/{reason}": count for reason, count in self.failures.items()}
        numbers["tokens_per_second"] = self.completion_tokens / max(time.monotonic() - self.began, 1e-9)
        numbers["mean_request_seconds"] = self.request_seconds / max(self.requests, 1)
        return numbers


log = logging.getLogger(__name__)

MAX_ATTEMPTS = 4
"""Number of attempts of one request after which the request fails."""

T = TypeVar("T")


class Router:
    """Send each request to the least loaded of the `replicas`.

    At most `max_concurrent` requests are in flight, and new requests wait while `drained` is active. The caller passes
    the function that sends a request to a replica. The event loop's clock is the only one used, so tests can control
    it.

    Attributes:
        in_flight: number of admitted requests without an answer.
        direct: number of requests among these that other processes send directly to servers.
        broken: the error that every request raises from now on, after a failed sync.
        closed: True once the pool is closed.
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
        """Wait for a free slot, and for the end of `drained` if it is active. Inside the block, count `requests` as in
        flight.

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
        """Return the result of `attempt(replica)`. After a `TransientError`, try another replica.

        Raises:
            GenerationFailure: `MAX_ATTEMPTS` attempts failed.
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
        """Wait until at least one server is ready, and return all ready servers.

        Raises:
            ServerError: every server is given up or waits for the next sync. Waiting would not help: the sync itself
                waits for this request.
        """
        async with self._changed:
            while not (ready := [replica for replica in self.replicas if replica.ready]):
                self._refuse_none_left()
                waiting = [replica.name for replica in self.replicas if replica.waits or replica.given_up]
                if waiting and len(waiting) == len(self.replicas):
                    raise ServerError(
                        "no remaining server has the current weights: the servers that came up later get the next ones",
                        code="no_current_server",
                        where=", ".join(waiting),
                        remedy="run the same command again: it resumes from the last checkpoint",
                    )
                await self._changed.wait()
            return ready

    async def reachable(self) -> None:
        """Wait until at least one server is up and can receive weights.

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
        """Wait until a server is ready, choose one for a request, and count the request as outstanding there.

        Servers whose names are not in `tried` are preferred, then servers with fewer outstanding requests.
        """
        best = min(await self.ready(), key=lambda replica: (replica.name in tried, replica.outstanding))
        best.outstanding += 1
        return best

    async def notify(self) -> None:
        """Wake all tasks that wait for a change of the servers or of the requests in flight."""
        async with self._changed:
            self._changed.notify_all()

    @asynccontextmanager
    async def drained(self, direct_only: Callable[[], bool] = lambda: False) -> AsyncIterator[None]:
        """Wait until no request is in flight, and hold back new ones inside the block.

        If `direct_only()` is true, wait only for the requests that other processes send directly to servers.
        """
        self._draining = True
        try:
            async with self._changed:
                await self._changed.wait_for(lambda: (self.direct if direct_only() else self.in_flight) == 0)
            yield
        finally:
            self._draining = False
