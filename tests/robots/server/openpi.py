"""A policy server like openpi's, written from its protocol: metadata first, one answer a request, a traceback and code
1011 after an error. Messages are encoded and decoded by hand."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from websockets.exceptions import ConnectionClosed
from websockets.sync.server import ServerConnection, serve

from armature.components.robots.evaluation.robot import libero_conventions
from armature.components.robots.libero.settings import SimulatorSettings
from armature.components.robots.policies.settings import RobotConventions, ServedPolicySettings
from tests.robots.server.by_hand import decode, encode

Answer = Callable[[dict[str, Any]], Any]
"""Function from a request to the answer's `actions`, or to a frame to send as it is (bytes or text); None: nothing is
sent; an exception is answered as openpi's server answers it."""
LIBERO: RobotConventions = libero_conventions(SimulatorSettings())


class HangUp(Exception):
    """Raised by an answer to end the connection without a frame."""


@contextmanager
def openpi_server(
    answer: Answer,
    metadata: Any = None,
    key: str | None = None,
    port: int = 0,
    max_size: int | None = None,
    sent: int = 1,
    moved: str | None = None,
) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Serve `answer` while the block runs; yield the address and the list of all requests. A function as `metadata` is
    called for each connection. Each answer is sent `sent` times. Connections are redirected to `moved`."""
    requests: list[dict[str, Any]] = []
    lock, connections = threading.Lock(), list[ServerConnection]()

    def handle(connection: ServerConnection) -> None:
        connections.append(connection)
        described = metadata() if callable(metadata) else metadata
        connection.send(described if isinstance(described, bytes | str) else encode(described or {}))
        try:
            while True:
                request = decode(connection.recv())
                with lock:  # one at a time, as in openpi
                    requests.append(request)
                    made = answer(request)
                if made is not None:
                    timing = {"server_timing": {"infer_ms": 1.5}}
                    for _ in range(sent):
                        connection.send(made if isinstance(made, bytes | str) else encode({"actions": made, **timing}))
        except (ConnectionClosed, HangUp):
            return
        except Exception as error:
            connection.send(f"Traceback (most recent call last):\n  File\n    line\n{type(error).__name__}: {error}\n")
            connection.close(1011, "Internal server error. Traceback included in previous frame.")

    def admit(connection: ServerConnection, request: Any) -> Any:
        if moved is not None:
            response = connection.respond(302, "")
            response.headers["Location"] = moved
            return response
        wanted = None if key is None else f"Api-Key {key}"
        return None if request.headers.get("Authorization") == wanted or key is None else connection.respond(401, "")

    with serve(handle, "127.0.0.1", port, compression=None, process_request=admit, max_size=max_size) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"ws://127.0.0.1:{server.socket.getsockname()[1]}", requests
        finally:
            server.shutdown()
            for connection in connections:
                connection.close()
            thread.join()


def external(url: str, **changes: Any) -> ServedPolicySettings:
    values: dict[str, Any] = {"url": url, "weights": "test", "conventions": LIBERO, "timeout_s": 20.0}
    return ServedPolicySettings(**{**values, **changes})
