"""A stand-in for a bad network and an overloaded store: an HTTP proxy that fails on purpose, in front of a real server.

What it passes on reaches the server unchanged, so what the server holds in the end is what a client really sent.
"""

from __future__ import annotations

import os
import random
import socket
import struct
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Event, Lock, Thread
from typing import Any
from urllib.parse import urlsplit

ERROR = '<?xml version="1.0"?><Error><Code>{code}</Code><Message>by the stand-in for a bad network</Message></Error>'
CODES = {500: "InternalError", 503: "ServiceUnavailable"}


@dataclass
class Faults:
    """Faults of the proxy, with the share of requests that each of them affects.

    Attributes:
        refused: share of requests that are answered with 500 or 503 and not passed on.
        unanswered: share of requests that are carried out but get no answer.
        truncated: share of requests whose answer is cut off.
        delay: longest delay of a request in seconds.
        away: while set, every connection is reset.
        counts: numbers of requests by what happened to them.
    """

    refused: float = 0.0
    unanswered: float = 0.0
    truncated: float = 0.0
    delay: float = 0.0
    seed: int = 0
    away: Event = field(default_factory=Event)
    counts: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self._rng, self._guard = random.Random(self.seed), Lock()

    def choose(self) -> tuple[str, float]:
        """Return the random fault of the next request, or "passed", and the delay in seconds before it."""
        with self._guard:
            drawn, delay = self._rng.random(), self._rng.uniform(0, self.delay)
            what = "passed"
            for kind in ("refused", "unanswered", "truncated"):
                drawn -= getattr(self, kind)
                if drawn < 0:
                    what = kind
                    break
            what = "away" if self.away.is_set() else what
            self.counts[what] += 1
            return what, delay


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    faults: Faults
    target: tuple[str, int]

    def _handle(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        what, delay = self.faults.choose()
        time.sleep(delay)
        if what == "away":
            self._reset()
        elif what == "refused":
            status = 500 if self.faults.counts["refused"] % 2 else 503
            self._answer(status, [("Content-Type", "text/xml")], ERROR.format(code=CODES[status]).encode())
        else:
            answer = self._passed_on(body)
            if what == "unanswered":
                self._reset()
            else:
                self._answer(*answer, whole=what == "passed")

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _handle

    def _passed_on(self, body: bytes) -> tuple[int, list[tuple[str, str]], bytes]:
        connection = HTTPConnection(*self.target, timeout=60)
        try:
            connection.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
            for name, value in self.headers.items():
                if name.lower() not in ("expect", "connection"):
                    connection.putheader(name, value)
            connection.endheaders(body)
            response = connection.getresponse()
            return response.status, response.getheaders(), response.read()
        finally:
            connection.close()

    def _answer(self, status: int, headers: list[tuple[str, str]], content: bytes, whole: bool = True) -> None:
        self.send_response_only(status)
        length = str(len(content))
        for name, value in headers:
            if name.lower() == "content-length" and self.command == "HEAD":
                length = value
            elif name.lower() not in ("content-length", "transfer-encoding", "connection"):
                self.send_header(name, value)
        self.send_header("Content-Length", length)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content if whole else content[: len(content) // 2])
        if not whole:
            self._reset()

    def _reset(self) -> None:
        """End the connection with a TCP reset (RST) instead of a regular close, as a router that has lost it does."""
        self.close_connection = True
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        os.close(self.connection.detach())

    def log_message(self, format: str, *args: object) -> None:
        """Do not log requests: the real server logs them."""


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exception(), OSError):  # a client may end its connection
            super().handle_error(request, client_address)


@contextmanager
def faulty(url: str, faults: Faults) -> Iterator[str]:
    """Run a proxy with `faults` in front of the server at `url` while the block runs, and yield the proxy's address."""
    parts = urlsplit(url)
    handler = type("Handler", (_Handler,), {"faults": faults, "target": (parts.hostname, parts.port)})
    with _Server(("127.0.0.1", 0), handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
