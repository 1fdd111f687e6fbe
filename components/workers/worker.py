"""What answers requests elsewhere, and where that is: in a process of this machine, or on a node of a cluster."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol, Self

from components.contracts.cluster import ClusterSettings
from components.workers.process import WorkerProcess

_CLUSTER: ContextVar[ClusterSettings | None] = ContextVar("cluster", default=None)


class Worker(Protocol):
    """A program that keeps a state between calls. It may be lost at any time; the next call then starts it again.

    Safe to share between threads, which wait for one another.
    """

    pid: int | None
    """Of its process on its machine, while there is one."""
    starts: int
    """How many processes there have been."""

    @property
    def alive(self) -> bool:
        """Whether it has begun and was not lost since; a call makes it so."""

    def call(self, method: str, *arguments: Any, timeout: float | None = None) -> Any:
        """What the handler's method returns, or the list of what it yields. Arguments and answer are data.

        `timeout`: another one for this call.

        Raises:
            WorkerError: the worker was lost.
            ArmatureError: what the handler raised; the worker stays as it is.
        """

    def close(self) -> None:
        """End it and its state; a call in flight fails, the next one starts it again."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...


@contextmanager
def workers_on(cluster: ClusterSettings | None) -> Iterator[None]:
    """What `make_worker` makes inside is on that cluster; on this machine without one."""
    token = _CLUSTER.set(cluster)
    try:
        yield
    finally:
        _CLUSTER.reset(token)


def current_cluster() -> ClusterSettings | None:
    return _CLUSTER.get()


def make_worker(
    module: str,
    settings: Mapping[str, Any] | None = None,
    *,
    timeout: float,
    env: Mapping[str, str | None] | None = None,
) -> Worker:
    """A worker that starts with its first call, where `workers_on` says.

    Args:
        module: the program; it calls `serve`.
        settings: keyword arguments of its handler, as data.
        timeout: seconds that it may be silent: from a call to the answer, or between two values that are yielded.
        env: more variables of the process; a value of None takes the variable away.
    """
    cluster = current_cluster()
    if cluster is None:
        return WorkerProcess(module, settings, timeout=timeout, env=env)
    from components.workers.actor import WorkerActor  # Ray is an extra

    return WorkerActor(cluster, module, settings, timeout=timeout, env=env)
