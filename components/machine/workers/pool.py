"""A pool of workers and the assignment of jobs. Jobs with the same key stay at one worker, since its state is
costly."""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from queue import SimpleQueue
from typing import Generic, Protocol, Self, TypeVar

from armature.components.machine.workers.channel import WorkerError


class Closable(Protocol):
    def close(self) -> None: ...


JobT = TypeVar("JobT")
ResultT = TypeVar("ResultT")
WorkerT = TypeVar("WorkerT", bound=Closable)


class WorkerPool(Generic[WorkerT]):
    """A pool of workers that live until `close`."""

    def __init__(self, make: Callable[[], WorkerT], count: int) -> None:
        self.workers = tuple(make() for _ in range(count))
        self._homes: dict[Hashable, int] = {}

    def of(self, key: Hashable) -> WorkerT:
        """Return the same worker for the same key. New keys are assigned to the workers in turn."""
        return self.workers[self._homes.setdefault(key, len(self._homes) % len(self.workers))]

    def run(
        self,
        jobs: Iterable[JobT],
        work: Callable[[WorkerT, JobT], ResultT],
        key: Callable[[JobT], Hashable],
        finished: Callable[[ResultT], None],
        attempts: int = 1,
    ) -> None:
        """Run `work` for every job in threads, and call `finished` in this thread for each result.

        Jobs of one key are run in the order of `jobs`. A worker keeps to the jobs of one key while there are any. A job
        whose worker was lost is tried again, `attempts` times in all.

        Raises:
            WorkerError: the last attempt failed. Other errors of `work` and `finished` are raised unchanged. In any
                case
                no further job is started, and the jobs in progress have ended.
        """
        queue = StickyQueue(jobs, key)
        done: SimpleQueue[Callable[[], None] | Future[None]] = SimpleQueue()

        def run(worker: WorkerT) -> None:
            held: Hashable = None
            while (job := queue.take(held)) is not None:
                held = key(job)
                done.put(partial(finished, _attempt(work, worker, job, attempts)))

        with ThreadPoolExecutor(len(self.workers)) as threads:
            for worker in self.workers:
                threads.submit(run, worker).add_done_callback(done.put)
            left = len(self.workers)
            try:
                while left:
                    latest = done.get()
                    if isinstance(latest, Future):
                        latest.result()
                        left -= 1
                    else:
                        latest()
            finally:
                queue.clear()

    def close(self) -> None:
        for worker in self.workers:
            worker.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class StickyQueue(Generic[JobT]):
    """A thread-safe queue of jobs by key. A thread stays at a key while the key has jobs.

    Then the thread takes the key with the most waiting jobs per thread.

    Args:
        held: keys of the threads that will begin with a key of their own.
    """

    def __init__(self, jobs: Iterable[JobT], key: Callable[[JobT], Hashable], held: Iterable[Hashable] = ()) -> None:
        self._waiting: dict[Hashable, deque[JobT]] = {}
        for job in jobs:
            self._waiting.setdefault(key(job), deque()).append(job)
        self._takers: Counter[Hashable] = Counter(held)
        self._lock = threading.Lock()

    def take(self, held: Hashable) -> JobT | None:
        """Return the next job for a thread at key `held` (None: no key yet). None: no job is left."""
        with self._lock:
            if held is not None and self._waiting.get(held):
                return self._waiting[held].popleft()
            if held is not None:
                self._takers[held] -= 1
            left = [key for key, jobs in self._waiting.items() if jobs]
            if not left:
                return None
            chosen = max(left, key=lambda key: len(self._waiting[key]) / (1 + self._takers[key]))
            self._takers[chosen] += 1
            return self._waiting[chosen].popleft()

    def clear(self) -> None:
        """Remove all jobs, so that every thread stops."""
        with self._lock:
            self._waiting.clear()


def _attempt(work: Callable[[WorkerT, JobT], ResultT], worker: WorkerT, job: JobT, attempts: int) -> ResultT:
    for _ in range(attempts - 1):
        with suppress(WorkerError):
            return work(worker, job)
    return work(worker, job)
