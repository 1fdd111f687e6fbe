"""The trainer service: a long-lived process group that trains, scores, publishes and saves when asked over HTTP.

Started by `armature.components.training.client` as `python -m armature.components.training.service settings.json`, once
per rank. Rank 0 answers on loopback, on a node of a cluster on its address; every command runs on all ranks, one at a
time. A command that cannot be carried out is refused before anything changes; an error after that ends the service, for
the weights may be half-way, and the next one starts from a checkpoint.
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
from armature.components.training.service_settings import WORKERS, FatalServiceError, ServiceSettings, describe, rebuild
from armature.components.training.service_worker import Command, ServiceWorker

TOKEN = "ARMATURE_TRAINER_TOKEN"
IDLE = 30.0
"""Seconds without a command after which the ranks make sure of each other."""
FIRST_STEPS = 3
"""They compile layers and make the optimizer's states, which are many objects that stay."""
KEEPS_STATE = ("score", "save", "settle", "publish", "send", "probe", "measure")
"""Commands that change nothing in the trainer: when one fails on all ranks alike, the service continues."""
LARGEST = 2**20
"""Bytes of a command."""
LINGER = 10.0
"""Seconds that answers in flight may take when the service ends."""


def main(settings_file: str) -> None:
    """Run until told to stop. The exit code is 1 if an error ended it."""
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
    """What `WORKERS` has under that name. Garbage is not looked for meanwhile, nor later in what was imported."""
    gc.disable()
    try:
        worker: Callable[[ServiceSettings, Ranks], ServiceWorker] = WORKERS[name]
    finally:
        gc.freeze()
        gc.enable()
    return worker


def serve(worker: ServiceWorker, settings: ServiceSettings, ranks: Ranks) -> None:
    """Take commands, one at a time, until one fails; the client ends the process."""
    host = os.environ.get(HOST, "127.0.0.1")
    front = HttpFrontend(os.environ[TOKEN], worker.recorded, host) if ranks.first else None
    if front is not None:
        write_file(settings.address, json.dumps({"url": front.start()}).encode())
    idle = min(IDLE, ranks.timeout.total_seconds() / 4)
    answer: Future[Any] | None = None
    steps = 0
    try:
        while True:
            # The others do not wait for longer than a collective may take: without a command, they hear that.
            own, answer = (front and front.next(idle)) or (None, None)
            command = ranks.broadcast(own)
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
    """Check on all ranks, then run on all ranks; `answer` is rank 0's."""
    prepared: Any = None
    refused: Exception | None = None
    try:
        prepared = worker.check(command)
    except Exception as error:  # of whatever kind: nothing has changed
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


if __name__ == "__main__":
    main(sys.argv[1])
