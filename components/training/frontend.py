"""The HTTP side of the trainer service: one queue of commands, one answer each."""

from __future__ import annotations

import asyncio
import json
import queue
import secrets
import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from armature.components.contracts.errors import ArmatureError
from armature.components.contracts.numbers import dump_json
from armature.components.training.errors import FatalServiceError, describe

Command = dict[str, Any]
LARGEST = 2**20
"""Bytes of a command."""
LINGER = 10.0
"""Seconds that answers in flight may take when the service ends."""


class HttpFrontend:
    """Serves POST /command and GET /status in a thread of its own.

    Args:
        token: what requests must bear.
        recorded: the result of a command that was carried out before, or None; it may refuse with an error.
        host: the address of this machine where it listens.
    """

    def __init__(self, token: str, recorded: Callable[[Command], Any], host: str = "127.0.0.1") -> None:
        self._token, self._recorded = token, recorded
        self._inbox: queue.Queue[tuple[Command, Future[Any]]] = queue.Queue()
        self._pending: dict[str, Future[Any]] = {}
        self._lock = threading.Lock()
        routes = [Route("/command", self._command, methods=["POST"]), Route("/status", self._status)]
        config = uvicorn.Config(Starlette(routes=routes), log_level="warning", timeout_graceful_shutdown=int(LINGER))
        self._server = uvicorn.Server(config)
        self._socket = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        self._socket.bind((host, 0))
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [self._socket]}, daemon=True)

    def start(self) -> str:
        """The base URL; connections are accepted from now on."""
        self._socket.listen()
        self._thread.start()
        host, port = self._socket.getsockname()[:2]
        return f"http://{f'[{host}]' if ':' in host else host}:{port}"

    def next(self, seconds: float) -> tuple[Command, Future[Any]] | None:
        """The next command and where its answer goes; None if none comes."""
        try:
            return self._inbox.get(timeout=seconds)
        except queue.Empty:
            return None

    def stop(self) -> None:
        """Deliver the answers that are ready and close."""
        self._server.should_exit = True
        self._thread.join(LINGER + 5)

    def _submit(self, command: Command) -> Future[Any]:
        """A step that is in progress or done is not started again: all who ask for it get the same answer."""
        key = repr(sorted(command.items()))
        with self._lock:
            pending = self._pending.get(key)
            if pending is not None and not pending.done():
                return pending
            answer: Future[Any] = Future()
            known = self._recorded(command)
            if known is not None:
                answer.set_result(known)
            else:
                self._pending = {k: f for k, f in self._pending.items() if not f.done()} | {key: answer}
                self._inbox.put((command, answer))
            return answer

    async def _command(self, request: Request) -> Response:
        if not self._authorized(request):
            return JSONResponse({"error": {"class": "TrainerError", "what": "wrong or missing token"}}, 401)
        try:
            command = json.loads(await _body(request))
        except (ValueError, RecursionError) as error:
            return JSONResponse({"error": {"class": "TrainerError", "what": f"not a command: {error}"}}, 400)
        if not isinstance(command, dict) or not isinstance(command.get("name"), str):
            return JSONResponse({"error": {"class": "TrainerError", "what": "a command is an object with a name"}}, 400)
        try:
            # Shielded: a client that goes away does not cancel what others may wait for.
            answer = await asyncio.shield(asyncio.wrap_future(self._submit(command)))
        except (ArmatureError, OSError, ValueError) as error:
            return JSONResponse({"error": describe(error)}, 409)
        except FatalServiceError as error:
            return JSONResponse({"error": describe(error.args[0])}, 500)
        return Response(dump_json({"result": answer}), media_type="application/json")

    async def _status(self, request: Request) -> JSONResponse:
        if not self._authorized(request):
            return JSONResponse({"error": {"class": "TrainerError", "what": "wrong or missing token"}}, 401)
        return JSONResponse({"status": "busy" if any(not f.done() for f in self._pending.values()) else "idle"})

    def _authorized(self, request: Request) -> bool:
        given = request.headers.get("authorization", "")
        return secrets.compare_digest(given.encode(), f"Bearer {self._token}".encode())


async def _body(request: Request) -> bytes:
    """
    Raises:
        ValueError: it is larger than any command.
    """
    body = b""
    async for part in request.stream():
        body += part
        if len(body) > LARGEST:
            raise ValueError(f"more than {LARGEST} bytes")
    return body
