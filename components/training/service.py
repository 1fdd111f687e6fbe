"""The trainer service: a long-lived process group that trains, scores, publishes and saves on commands over HTTP.

`armature.components.training.client` starts it, once per rank, as `python -m armature.components.training.service
settings.json`. Rank 0 listens on loopback, or on its node's address in a cluster. Every command runs on all ranks, one
command at a time. A command is checked first, and refused before anything has changed. An error after that ends the
service, because the weights may be half updated; the next service starts from a checkpoint.
"""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import os
import queue
import secrets
import socket
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from armature.components.artifacts.disk import write_file
from armature.components.contracts.errors import ArmatureError
from armature.components.contracts.metrics import dump_json
from armature.components.machine.resources import exempt_from_collection
from armature.components.training.placed import HOST
from armature.components.training.processes import RENDEZVOUS, error_file
from armature.components.training.ranks import Ranks, joined
from armature.components.training.service_settings import (
    TOKEN,
    WORKERS,
    FatalServiceError,
    ServiceSettings,
    describe,
    rebuild,
)
from armature.components.training.service_worker import Command, ServiceWorker

IDLE = 30.0
"""Seconds without a command after which the ranks check that all of them still answer."""
FIRST_STEPS = 3
"""Number of first steps, after which all objects made so far are exempted from garbage collection.

These steps compile layers and make the optimizer's states: many objects that live as long as the process.
"""
KEEPS_STATE = ("score", "save", "settle", "publish", "send", "probe", "measure")
"""Commands that do not change the trainer's state. With one rank, the service keeps running if one of them fails."""
LARGEST = 2**20
"""Largest size of a command in bytes."""
LINGER = 10.0
"""Seconds that the server waits at its end for replies that are still being sent."""


def main(settings_file: str) -> None:
    """Run one rank of the service until an error or the client ends it.

    An error is described in the rank's error file and raised, so that the exit code is 1.
    """
    settings = ServiceSettings.model_validate_json(Path(settings_file).read_text())
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    with ExitStack() as group:
        try:
            ranks = group.enter_context(joined(settings.processes, settings.seed))
            serve(imported_worker(settings.worker)(settings, ranks), settings, ranks)
        except BaseException as error:
            rendezvous = Path(os.environ[RENDEZVOUS]).parent
            error_file(rendezvous, int(os.environ["RANK"])).write_text(json.dumps(describe(error)))
            raise


def imported_worker(name: str) -> Callable[[ServiceSettings, Ranks], ServiceWorker]:
    """Import and return the worker class for `name`, a key of `WORKERS`.

    Garbage collection is off during the import, and imported objects are exempt from it later: they are many and stay.
    """
    gc.disable()
    try:
        worker: Callable[[ServiceSettings, Ranks], ServiceWorker] = WORKERS[name]
    finally:
        gc.freeze()
        gc.enable()
    return worker


def serve(worker: ServiceWorker, settings: ServiceSettings, ranks: Ranks) -> None:
    """Carry out commands, one at a time on all ranks, until one fails or the client ends the process."""
    host = os.environ.get(HOST, "127.0.0.1")
    front = HttpFrontend(os.environ[TOKEN], worker.recorded, host) if ranks.first else None
    if front is not None:
        write_file(settings.address, json.dumps({"url": front.start()}).encode())
    idle = min(IDLE, ranks.timeout.total_seconds() / 4)
    answer: Future[Any] | None = None
    steps = 0
    try:
        while True:
            # The other ranks wait in a broadcast, which must end before its timeout: without a command send them None.
            received, answer = (front and front.next(idle)) or (None, None)
            command = ranks.broadcast(received)
            if command is None:
                continue
            carry_out(worker, command, answer, ranks)
            if command["name"] == "step" and steps < FIRST_STEPS:
                steps += 1
                exempt_from_collection()
    except BaseException as error:
        if answer is not None and not answer.done():
            answer.set_exception(FatalServiceError(error))
        raise
    finally:
        if front is not None:
            front.stop()


def carry_out(worker: ServiceWorker, command: Command, answer: Future[Any] | None, ranks: Ranks) -> None:
    """Let all ranks check a command. If every rank accepts it, run it on all ranks.

    Args:
        answer: on rank 0, the future that gets the result or the error; None on the other ranks.
    """
    prepared: Any = None
    refused: Exception | None = None
    try:
        prepared = worker.check(command)
    except Exception as error:  # any error is a refusal, because nothing has changed yet
        refused = error
    first_refusal = next((error for error in ranks.gather(describe(refused) if refused else None) if error), None)
    if first_refusal is not None:
        if answer is not None:
            answer.set_exception(rebuild(first_refusal))
        return
    try:
        result = worker.run(command, prepared)
    except BaseException as error:
        survives = ranks.size == 1 and command["name"] in KEEPS_STATE and isinstance(error, ArmatureError)
        if answer is not None:
            answer.set_exception(error if survives else FatalServiceError(error))
        if survives:
            return
        raise
    if answer is not None:
        answer.set_result(result)


class HttpFrontend:
    """Serves POST /command and GET /status in its own thread.

    Args:
        token: the bearer token that requests must have.
        recorded: returns the result of a command that was carried out before, else None; it may raise a refusal.
        host: the address of this machine on which to listen, at a free port.
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
        """Start accepting connections and return the base URL."""
        self._socket.listen()
        self._thread.start()
        host, port = self._socket.getsockname()[:2]
        return f"http://{f'[{host}]' if ':' in host else host}:{port}"

    def next(self, seconds: float) -> tuple[Command, Future[Any]] | None:
        """Return the next command and the future for its result; None if no command arrives within `seconds`."""
        try:
            return self._inbox.get(timeout=seconds)
        except queue.Empty:
            return None

    def stop(self) -> None:
        """Send the replies that are ready and stop the server."""
        self._server.should_exit = True
        self._thread.join(LINGER + 5)

    def _submit(self, command: Command) -> Future[Any]:
        """Queue a command and return its future.

        A step that is in progress or done is not queued again: repeated requests get the same future or result.
        """
        key = repr(sorted(command.items()))
        with self._lock:
            pending = self._pending.get(key)
            if pending is not None and not pending.done():
                return pending
            answer: Future[Any] = Future()
            result = self._recorded(command)
            if result is not None:
                answer.set_result(result)
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
            # Shielded: when a client disconnects, this request is cancelled, but others may wait for the same future.
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
        header = request.headers.get("authorization", "")
        return secrets.compare_digest(header.encode(), f"Bearer {self._token}".encode())


async def _body(request: Request) -> bytes:
    """Read the body of a request.

    Raises:
        ValueError: the body is larger than `LARGEST`.
    """
    body = b""
    async for part in request.stream():
        body += part
        if len(body) > LARGEST:
            raise ValueError(f"more than {LARGEST} bytes")
    return body


if __name__ == "__main__":
    main(sys.argv[1])
