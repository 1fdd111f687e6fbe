"""What answers requests elsewhere, and where that is: in a process of this machine, or on a node of a cluster."""

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

    def call(self, method: str, *arguments: Any, reply: TypeAdapter[ReplyT], timeout: float | None = None) -> ReplyT:
        """What the handler's method returns, if it has the form of `reply`. Arguments and reply are data.

        `timeout`: another one for this call.

        Raises:
            WorkerError: the worker was lost. One that answers in another form is ended.
            ArmatureError: what the handler raised; the worker stays as it is.
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
        """The values that the handler's method yields, at most `most_parts`, and what it returns; else as `call`.

        Each of them has `timeout` seconds, so the whole call has `timeout * (most_parts + 1)`.
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
    most_bytes: int = MOST_BYTES,
) -> Worker:
    """A worker that starts with its first call, where `workers_on` says.

    Args:
        module: the program; it calls `serve`.
        settings: keyword arguments of its handler, as data.
        timeout: seconds of a whole call: its start if it has not begun, the request, and the reply.
        env: more variables of the process; a value of None takes the variable away.
        most_bytes: of all that it may answer to one request.
    """
    cluster = current_cluster()
    if cluster is None:
        return WorkerProcess(module, settings, timeout=timeout, env=env, most_bytes=most_bytes)
    from armature.components.machine.workers.actor import WorkerActor  # Ray is an extra

    return WorkerActor(cluster, module, settings, timeout=timeout, env=env, most_bytes=most_bytes)
