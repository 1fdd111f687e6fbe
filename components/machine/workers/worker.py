"""The protocol of workers, and `make_worker`, which places them on this machine or on a Ray cluster."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol, Self

from pydantic import TypeAdapter

from armature.components.contracts.cluster import ClusterSettings
from armature.components.machine.workers.channel import MOST_BYTES
from armature.components.machine.workers.process import WorkerProcess
from armature.components.machine.workers.requests import PartT, ReplyT

_CLUSTER: ContextVar[ClusterSettings | None] = ContextVar("cluster", default=None)


class Worker(Protocol):
    """A program that keeps state between calls. If it is lost, the next call starts it again, with new state.

    Threads may share a worker; their calls run one after the other.
    """

    pid: int | None
    """PID of its process on its machine while it runs, else None."""
    starts: int
    """Number of processes that were started."""

    @property
    def alive(self) -> bool:
        """True if the worker runs: it was started by a call and not lost since."""

    def call(self, method: str, *arguments: Any, reply: TypeAdapter[ReplyT], timeout: float | None = None) -> ReplyT:
        """Call a method of the handler and return its result, validated by `reply`. Arguments and result are data.

        `timeout`: time limit of this call in seconds, in place of the worker's.

        Raises:
            WorkerError: the worker was lost, or ended because its answer was not valid.
            ArmatureError: the handler raised it; the worker keeps its state.
        """

    def stream(
        self,
        method: str,
        *arguments: Any,
        part: TypeAdapter[PartT],
        most_parts: int,
        reply: TypeAdapter[ReplyT],
        timeout: float | None = None,
    ) -> tuple[list[PartT], ReplyT]:
        """Return the values that a generator method yields, at most `most_parts`, and its result; otherwise like
        `call`.

        Each value has a time limit of `timeout` seconds, so the whole call has `timeout * (most_parts + 1)`.
        """

    def close(self) -> None:
        """End the worker and discard its state. A call in flight fails, and the next call starts the worker again."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...


@contextmanager
def workers_on(cluster: ClusterSettings | None) -> Iterator[None]:
    """Place the workers that `make_worker` creates in the block on `cluster`; None: on this machine."""
    token = _CLUSTER.set(cluster)
    try:
        yield
    finally:
        _CLUSTER.reset(token)


def current_cluster() -> ClusterSettings | None:
    """Return the cluster that `workers_on` has set, or None."""
    return _CLUSTER.get()


def make_worker(
    module: str,
    settings: Mapping[str, Any] | None = None,
    *,
    timeout: float,
    env: Mapping[str, str | None] | None = None,
    most_bytes: int = MOST_BYTES,
) -> Worker:
    """Return a worker that starts with its first call, at the place that `workers_on` has set.

    Args:
        module: the module to run as the program; it calls `serve`.
        settings: keyword arguments of its handler, as data.
        timeout: seconds for a whole call: the start of the process if needed, the request and the reply.
        env: additional environment variables; None removes a variable.
        most_bytes: largest size of all answers to one request.
    """
    cluster = current_cluster()
    if cluster is None:
        return WorkerProcess(module, settings, timeout=timeout, env=env, most_bytes=most_bytes)
    from armature.components.machine.workers.actor import WorkerActor  # Ray is an extra

    return WorkerActor(cluster, module, settings, timeout=timeout, env=env, most_bytes=most_bytes)
