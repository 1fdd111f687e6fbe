"""The policy server: serves a robot policy over websockets, with the protocol of openpi's clients.

After a client connects, the server sends its metadata as one MessagePack frame. Each request is one frame with an
observation. Each answer is one frame: a map with `actions`, `seed` and `server_timing`, or a text frame with an error
message. Requests of a connection are answered in order. `GET /healthz` returns 200 while the policy works.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from http import HTTPStatus
from typing import Any

from websockets.asyncio.server import Server, ServerConnection, serve
from websockets.exceptions import ConnectionClosed
from websockets.http11 import Request, Response

from armature.components.contracts.errors import ArmatureError, ConfigurationError, DataError
from armature.components.contracts.robots import RobotPolicy
from armature.components.machine.network import listener
from armature.components.robots.server.metrics import PolicyServerMetrics, log_event
from armature.components.robots.server.settings import PolicyServerSettings
from armature.components.robots.server.waiting import BusyError, PolicyQueue, ServedChunk
from armature.components.robots.server.wire import SCHEME, Message, ObservationFormat, pack

log = logging.getLogger(__name__)
_WEBSOCKETS = logging.getLogger(f"{__name__}.websockets")
_WEBSOCKETS.setLevel(logging.CRITICAL)  # the library logs every failed handshake as an error


def refuse_open_address(settings: PolicyServerSettings, with_key: bool) -> None:
    """Check that a server without a key only listens on loopback.

    Raises:
        ConfigurationError: there is no key, and the host is reachable from other machines.
    """
    if not with_key and not settings.local:
        raise ConfigurationError(
            "without a key, everybody who reaches the address could use the policy",
            code="key_missing",
            where=f"host {settings.host}",
            remedy="use a key, or listen on 127.0.0.1",
        )


class PolicyServer:
    """Serves a policy to clients with the right key. Use each instance in one event loop."""

    def __init__(
        self,
        policy: RobotPolicy,
        form: ObservationFormat,
        settings: PolicyServerSettings,
        key: str | None,
        facts: Mapping[str, Any],
        metrics: PolicyServerMetrics,
    ) -> None:
        """
        Args:
            form: Fields that clients send, and their meaning.
            key: Key that clients must send; None: no key is needed, which is only allowed on loopback.
            facts: Description of the policy for the metadata.

        Raises:
            ConfigurationError: see `refuse_open_address`.
        """
        refuse_open_address(settings, key is not None)
        self._form, self._settings, self._key, self._metrics = form, settings, key, metrics
        self._queue = PolicyQueue(policy, settings.batch, settings.max_waiting)
        metrics.waiting.set_function(lambda: self._queue.waiting)
        actions = {"dtype": "float32", "shape": [policy.n_action_steps, policy.action_dimensions]}
        self._metadata = pack(
            {"server": "armature", "observation": form.describe(), "actions": actions, "policy": dict(facts)}
        )

    async def run(self, ready: Callable[[str], None]) -> None:
        """Serve until the task is cancelled.

        Args:
            ready: Called with the server's address once the policy has made a first prediction.

        Raises:
            ConfigurationError: the server cannot listen on the address.
            ArmatureError: the policy fails at the first prediction.
        """
        answering = asyncio.ensure_future(self._queue.run())
        try:
            await self._queue.ask(self._form.blank(), 0)
            server = await self._listen()
            try:
                ready(_url(server))
                await answering
            finally:
                server.close()
                await server.wait_closed()
        finally:
            answering.cancel()
            with suppress(asyncio.CancelledError):
                await answering

    async def _listen(self) -> Server:
        settings = self._settings
        try:
            return await serve(
                self._serve,
                settings.host,
                settings.port,
                process_request=self._admit,
                # Without a key, refuse browsers, which always send an origin: any web page could use the policy.
                origins=[None] if self._key is None else None,
                compression=None,
                max_size=settings.max_message_mib * 2**20,
                max_queue=1,
                server_header=None,
                logger=_WEBSOCKETS,
            )
        except OSError as error:
            raise ConfigurationError(
                f"the server cannot listen on the address: {error.strerror}",
                code="address_unavailable",
                where=f"{settings.host}:{settings.port} {listener(settings.port)}".strip(),
                remedy="choose another address with --port or --host",
            ) from error

    def _admit(self, connection: ServerConnection, request: Request) -> Response | None:
        """Answer a request to /healthz, and refuse a client without the right key.

        For all other requests, return None, which lets the websocket handshake go on.
        """
        if request.path == "/healthz":
            if self._queue.healthy:
                return connection.respond(HTTPStatus.OK, "OK\n")
            return connection.respond(HTTPStatus.SERVICE_UNAVAILABLE, "the policy failed, see the server's log\n")
        headers = request.headers.get_all("Authorization")
        if self._key is None or (len(headers) == 1 and _same(headers[0], SCHEME + self._key)):
            return None
        self._metrics.refused_keys.inc()
        log_event("key refused", _client(connection))
        return connection.respond(HTTPStatus.UNAUTHORIZED, f"send the header Authorization: {SCHEME}KEY\n")

    async def _serve(self, connection: ServerConnection) -> None:
        """Serve a connection until it is closed."""
        closed = asyncio.ensure_future(connection.wait_closed())
        self._metrics.connections.inc()
        log_event("connected", _client(connection))
        try:
            with suppress(ConnectionClosed):
                await self._converse(connection, closed)
        except Exception:
            log.exception("a connection failed", extra={"facts": {"client": _client(connection)}})
            raise
        finally:
            closed.cancel()
            self._metrics.connections.dec()
            log_event("disconnected", _client(connection), code=connection.close_code, reason=connection.close_reason)

    async def _converse(self, connection: ServerConnection, closed: asyncio.Future[None]) -> None:
        """Send the policy's metadata to a client, then answer the client's requests one after the other."""
        await connection.send(self._metadata)
        answered, previous = 0, dict[str, float]()
        async for frame in connection:
            began = time.monotonic()
            try:
                request = self._form.read(frame)
                seed = answered if request.seed is None else request.seed
                answer = await _unless(closed, self._queue.ask(request.observation, seed))
            except ArmatureError as error:
                self._metrics.requests.labels(outcome := _outcome(error)).inc()
                log_event(outcome, _client(connection), what=error.what, where=error.where)
                await connection.send(str(error))
                continue
            if answer is None:
                return
            self._metrics.answered(time.monotonic() - began, answer.rows)
            await connection.send(pack(_message(answer, seed, previous)))
            answered, previous = answered + 1, {"prev_total_ms": 1000 * (time.monotonic() - began)}


async def _unless(closed: asyncio.Future[None], asking: Coroutine[Any, Any, ServedChunk]) -> ServedChunk | None:
    """Return the result of `asking`. If the connection is closed before, cancel `asking` and return None."""
    task = asyncio.ensure_future(asking)
    either: set[asyncio.Future[Any]] = {closed, task}
    try:
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        return await task if task.done() else None
    finally:
        task.cancel()


def _outcome(error: ArmatureError) -> str:
    if isinstance(error, BusyError):
        return "busy"
    return "refused" if isinstance(error, DataError) else "failed"


def _message(answer: ServedChunk, seed: int, previous: Mapping[str, float]) -> Message:
    timing = {"infer_ms": 1000 * answer.computed, "wait_ms": 1000 * answer.waited}
    return {"actions": answer.actions, "seed": seed, "server_timing": {**timing, **previous}}


def _same(header: str, expected: str) -> bool:
    """Return True if a client's header is the expected one.

    The comparison takes constant time, so that its duration reveals nothing about the key.
    """
    return secrets.compare_digest(header.encode(errors="replace"), expected.encode())


def _client(connection: ServerConnection) -> str:
    address = connection.remote_address  # it is None if the client disconnected immediately
    return f"{address[0]}:{address[1]}" if address else "unknown"


def _url(server: Server) -> str:
    host, port = next(iter(server.sockets)).getsockname()[:2]
    return f"ws://[{host}]:{port}" if ":" in host else f"ws://{host}:{port}"
