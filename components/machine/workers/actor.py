"""The caller's side of a worker on a node of a Ray cluster, where an actor guards the worker's process.

Requests and answers are the same bytes as for a local worker process. But Ray itself unpickles the messages of its
cluster, so a cluster must be as trusted as this machine.
"""

from __future__ import annotations

import os
import reprlib
import signal
import socket
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from importlib.metadata import distributions
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import Field, NonNegativeInt, PositiveInt, TypeAdapter

from armature.components.contracts.cluster import LEAST_AMOUNT, ClusterSettings
from armature.components.contracts.digests import file_digest, listing_digest
from armature.components.contracts.errors import ArmatureError, ConfigurationError
from armature.components.contracts.installation import install_command
from armature.components.machine.workers.channel import MOST_BYTES, WorkerError, decoded, described, encoded, restored
from armature.components.machine.workers.process import GRACE, WorkerProcess
from armature.components.machine.workers.requests import ANYTHING, PartT, ReplyForm, ReplyT, checked

PING_SECONDS = 30.0
"""Seconds for an actor to answer a ping during a long call."""

ENDING_SECONDS = 60.0
"""Seconds for an actor to end a worker's process after the time limit of a call."""

REACH_SECONDS = 10.0
"""Seconds for the head of a cluster to accept a connection."""

_JOINING = threading.Lock()
_joined: list[str] = []
"""Address of the Ray cluster that `joined` connected this process to; empty if the program had connected by itself."""


class WorkerActor:
    """A `Worker` on a node that Ray chooses. If the node is lost, it starts again on another one."""

    def __init__(
        self,
        cluster: ClusterSettings,
        module: str,
        settings: Mapping[str, Any] | None = None,
        *,
        timeout: float,
        env: Mapping[str, str | None] | None = None,
        most_bytes: int = MOST_BYTES,
    ) -> None:
        """
        Args: see `make_worker`.
        """
        self._cluster, self._module, self._timeout = cluster, module, timeout
        self._arguments = module, encoded(dict(settings or {})), timeout, encoded(dict(env or {})), most_bytes
        self._lock = threading.Lock()
        self._actor: Any = None
        self._before = 0  # processes of actors that are gone
        self.node = ""
        """Address of the node on which the worker ran last."""
        self.pid: int | None = None
        self.starts = 0

    @property
    def alive(self) -> bool:
        """See `Worker.alive`."""
        return self.pid is not None

    def call(self, method: str, *arguments: Any, reply: TypeAdapter[ReplyT], timeout: float | None = None) -> ReplyT:
        """See `Worker.call`; raises what `stream` does."""
        return self.stream(method, *arguments, part=ANYTHING, most_parts=0, reply=reply, timeout=timeout)[1]

    def stream(
        self,
        method: str,
        *arguments: Any,
        part: TypeAdapter[PartT],
        most_parts: int,
        reply: TypeAdapter[ReplyT],
        timeout: float | None = None,
    ) -> tuple[list[PartT], ReplyT]:
        """See `Worker.stream`.

        Raises:
            ConfigurationError: the cluster does not answer, has no room, or its nodes have other code.
        """
        timeout = self._timeout if timeout is None else timeout
        request = encoded([method, arguments])
        with self._lock:
            ray = joined(self._cluster.address)
            try:
                actor = self._actor or self._start(ray)
                answer = HostAnswer.model_validate(decoded(self._answer(ray, actor, request, timeout, most_parts)))
                if answer.error is None:
                    result = [checked(part, each) for each in answer.parts or []], checked(reply, answer.value)
            except BaseException as error:
                where = f"{self._module} on node {self.node}, {method}{reprlib.repr(arguments)}"
                self._end()
                if isinstance(error, ValueError | EOFError):
                    raise WorkerError(
                        f"the worker's answer cannot be read: {error!s:.500}", code="worker_reply_invalid", where=where
                    ) from error
                if not isinstance(error, ray.exceptions.RayError):
                    raise
                cause = None if isinstance(error, TimeoutError) else error
                raise WorkerError(
                    "the worker's actor or its node is gone", code="worker_node_lost", where=where
                ) from cause
            self.pid = answer.pid
            self.starts = self._before + answer.starts
        if answer.error is None:
            return result
        raise restored(answer.error) from (None if answer.in_time else TimeoutError())

    def close(self) -> None:
        """See `Worker.close`."""
        if self._lock.acquire(blocking=False):
            try:
                self._end(GRACE)
            finally:
                self._lock.release()
        elif actor := self._actor:  # a thread that waits for room or for an answer then gets an error
            import ray

            ray.kill(actor)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self, ray: Any) -> Any:
        """Start the actor and check its node.

        Raises:
            ConfigurationError: no node has room for the actor, or the node does not have the same code.
        """
        # Concurrent calls, so that a ping or `close` need not wait for a running call.
        remote = ray.remote(_Host).options(**self._cluster.options(), max_restarts=0, max_concurrency=4)
        self._actor = actor = remote.remote(*self._arguments)
        try:
            about = decoded(ray.get(actor.about.remote(), timeout=self._cluster.start_timeout))
        except ray.exceptions.GetTimeoutError as error:
            wanted = {key: value for key, value in self._cluster.options().items() if value}
            free = {key: value for key, value in ray.available_resources().items() if "node:" not in key}
            raise ConfigurationError(
                f"no node of the cluster had room for a worker within {self._cluster.start_timeout:g} s: it takes "
                f"{wanted}, free on all nodes together: {free}",
                code="no_room_in_cluster",
                where="machine.cluster",
                remedy="add nodes, or let fewer machine.workers take less",
            ) from error
        except ray.exceptions.RayActorError as error:
            if not error.actor_init_failed:
                raise
            raise not_started("workers", self._cluster.address, error) from error
        self.node = about["node"]
        refuse_other(about, "machine.cluster")
        return actor

    def _answer(self, ray: Any, actor: Any, request: bytes, timeout: float, most_parts: int) -> bytes:
        """Wait for the actor's answer. The actor enforces the time limits of the worker; this only detects a lost
        node."""
        answer = actor.call.remote(request, timeout, most_parts)
        end = time.monotonic() + timeout * (most_parts + 1) + ENDING_SECONDS
        while not ray.wait([answer], timeout=max(timeout, PING_SECONDS))[0]:
            ray.get(actor.ping.remote(), timeout=PING_SECONDS)
            if time.monotonic() > end:
                raise ray.exceptions.GetTimeoutError("the actor has not ended its worker in time")
        content: bytes = ray.get(answer)
        return content

    def _end(self, patience: float = 0.0) -> None:
        actor, self._actor, self.pid = self._actor, None, None
        if actor is None:
            return
        self._before = self.starts
        import ray

        if not ray.is_initialized():  # the process ends, and its actors with it
            return
        with suppress(ray.exceptions.RayError):
            if patience:
                ray.get(actor.close.remote(), timeout=patience + GRACE)
            ray.kill(actor)


class HostAnswer(ReplyForm):
    """The answer of a `_Host` to one call.

    It holds the streamed parts and the return value, or an error. `in_time` is False if the error is a timeout.
    """

    parts: list[Any] | None = None
    value: Any = None
    error: Annotated[list[str], Field(min_length=5, max_length=5)] | None = None
    in_time: bool = True
    pid: PositiveInt | None
    starts: NonNegativeInt


class _Host:
    """The Ray actor on the node. It owns a worker's process, which ends together with the actor."""

    def __init__(self, module: str, settings: bytes, timeout: float, env: bytes, most_bytes: int) -> None:
        self._worker = WorkerProcess(
            module, decoded(settings), timeout=timeout, env=decoded(env), most_bytes=most_bytes
        )

    def about(self) -> bytes:
        from ray.util import get_node_ip_address

        return encoded({"node": get_node_ip_address(), **installed()})

    def ping(self) -> None: ...

    def call(self, request: bytes, timeout: float, most_parts: int) -> bytes:
        method, arguments = decoded(request)
        answer: dict[str, Any]
        try:
            parts, value = self._worker.stream(
                method, *arguments, part=ANYTHING, most_parts=most_parts, reply=ANYTHING, timeout=timeout
            )
            answer = {"parts": parts, "value": value}
        except ArmatureError as error:
            answer = {"error": described(error), "in_time": not isinstance(error.__cause__, TimeoutError)}
        return encoded({**answer, "pid": self._worker.pid, "starts": self._worker.starts})

    def close(self) -> None:
        self._worker.close()


def joined(address: str) -> Any:
    """Join the cluster as a driver and return the module `ray`. A token is required unless `RAY_AUTH_MODE` is set.

    Raises:
        ConfigurationError: Ray is not installed, or the cluster does not answer.
    """
    with _JOINING:
        before = signal.getsignal(signal.SIGTERM)
        os.environ.setdefault("RAY_AUTH_MODE", "token")  # read when Ray is imported
        try:
            import ray
        except ImportError as error:
            raise ConfigurationError(
                "Ray is not installed", code="ray_missing", where="machine.cluster", remedy=install_command("cluster")
            ) from error
        finally:
            if threading.current_thread() is threading.main_thread():
                signal.signal(signal.SIGTERM, before)  # importing Ray replaces the handler
        if not ray.is_initialized():
            _joined.clear()
            try:
                _reach(address)
                ray.init(address=address, log_to_driver=False, configure_logging=False)
            except (OSError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
                raise ConfigurationError(
                    f"the Ray cluster cannot be joined: {error}",
                    code="cluster_not_joined",
                    where=f"machine.cluster.address = {address!r}",
                    remedy="`ray status --address HOST:PORT` says whether it runs, `ray start --head` starts one here; "
                    "its nodes and this process need the same token (RAY_AUTH_TOKEN or ~/.ray/auth_token)",
                ) from error
            _joined.append(address)
        if _joined and _joined != [address]:
            raise ConfigurationError(
                f"this process has joined the cluster {_joined[0]!r} before, and cannot join another",
                code="other_cluster_joined",
                where=f"machine.cluster.address = {address!r}",
            )
        return ray


def not_started(what: str, address: str, error: Exception) -> ConfigurationError:
    """Return the error for an actor that its node could not create."""
    return ConfigurationError(
        f"the cluster cannot start {what}: {error}",
        code="cluster_start_failed",
        where=f"machine.cluster.address = {address!r}",
        remedy="install the same release of Armature on each node, or start them from the same image",
    )


def _reach(address: str) -> None:
    """Raise OSError if nothing listens at the address. Ray itself would take minutes to report this."""
    if address != "auto":
        host, _, port = address.removeprefix("ray://").rpartition(":")
        socket.create_connection((host.strip("[]"), int(port)), REACH_SECONDS).close()


def room(address: str, wanted: Mapping[str, float]) -> dict[str, int]:
    """Return, for each node of the cluster, how many times the resources `wanted` fit on it while it is idle.

    Raises:
        ConfigurationError: the cluster cannot be joined, see `joined`.
    """
    nodes = [node for node in joined(address).nodes() if node["Alive"]]
    return {
        f"{node['NodeManagerAddress']} ({node['NodeID'][:8]})": min(
            (_times(amount, node["Resources"].get(name, 0)) for name, amount in wanted.items()), default=1000
        )
        for node in nodes
    }


def _times(amount: float, whole: float) -> int:
    """Return how many times the resource amount `amount` fits in `whole`.

    Both are rounded to Ray's units of 1e-4, so 0.2 fits five times in 1.
    """
    return round(whole / LEAST_AMOUNT) // round(amount / LEAST_AMOUNT)


@cache
def installed() -> dict[str, Any]:
    """Return the digest of this project's code and the version of every installed package. Results depend on both."""
    components = Path(__file__).parents[2]
    code = {path.relative_to(components).as_posix(): file_digest(path) for path in components.rglob("*.py")}
    return {"code": listing_digest(code), "packages": {each.name.lower(): each.version for each in distributions()}}


def refuse_other(about: Mapping[str, Any], where: str) -> None:
    """Check that a node has the same code and packages as this machine.

    Raises:
        ConfigurationError: they differ, so the node's results might differ too.
    """
    here, there = installed(), about
    different = [
        f"{name} {there['packages'][name]}, here {version}"
        for name, version in here["packages"].items()
        if there["packages"].get(name, version) != version
    ]
    if here["code"] != there["code"]:
        different.insert(0, "other code of Armature")
    if different:
        raise ConfigurationError(
            f"the node has {'; '.join(different[:3])}",
            code="node_differs",
            where=f"{where}, node {about['node']}",
            remedy="install the same on each node, or start them from the same image",
        )
