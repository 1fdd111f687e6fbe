"""A queue of calls for several workers of one kind."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any, TypeVar
from weakref import finalize

from armature.components.machine.workers.worker import Worker

ResultT = TypeVar("ResultT")
Job = tuple[Future[Any], Callable[[Worker], Any]]


class WorkerQueue:
    """Calls wait for a free worker in their order of arrival. Safe to share between threads.

    The workers end when this object is closed or garbage-collected.

    Args:
        workers: workers of one kind.
        name: name of the threads that wait for the workers.
        closed: the error of calls that no worker has begun when the queue is closed.
    """

    def __init__(self, workers: Sequence[Worker], name: str, closed: Exception) -> None:
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._closed = closed
        self.close = finalize(self, _end, workers, self._jobs, closed)
        for worker in workers:
            Thread(target=_work, args=(worker, self._jobs), name=name, daemon=True).start()

    def submit(self, work: Callable[[Worker], ResultT]) -> Future[ResultT]:
        """Call `work` with a worker as soon as one is free."""
        future: Future[ResultT] = Future()
        if not self.close.alive:
            future.set_exception(self._closed)
        else:
            self._jobs.put((future, work))
        return future


def _work(worker: Worker, jobs: SimpleQueue[Job | None]) -> None:
    while (job := jobs.get()) is not None:
        future, work = job
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(work(worker))
            except BaseException as error:
                future.set_exception(error)
    worker.close()


def _end(workers: Sequence[Worker], jobs: SimpleQueue[Job | None], closed: Exception) -> None:
    with suppress(Empty):
        while job := jobs.get_nowait():
            if job[0].set_running_or_notify_cancel():
                job[0].set_exception(closed)
    for _ in workers:
        jobs.put(None)
    for worker in workers:  # calls in flight fail as their process ends
        worker.close()
