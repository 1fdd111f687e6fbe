"""The trainer service's HTTP: bytes from anybody on this machine, and commands of somebody with the token."""

from __future__ import annotations

import random
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx

from armature.components.contracts.errors import DataError
from armature.components.training.service import HttpFrontend
from tests.fuzz.doors import Attempt, expect
from tests.fuzz.mutate import damaged_bytes, damaged_document, dumps

TOKEN = "a-token"


def request(body: bytes, token: str | None) -> bytes:
    lines = ["POST /command HTTP/1.1", "Host: 127.0.0.1", f"Content-Length: {len(body)}", "Connection: close"]
    lines += [f"Authorization: Bearer {token}"] if token else []
    return "\r\n".join([*lines, "", ""]).encode() + body


@contextmanager
def door(folder: Path) -> Iterator[Attempt]:
    front, seen = HttpFrontend(TOKEN, lambda command: None), list[Any]()

    def work() -> None:
        while True:
            if (taken := front.next(1.0)) is None:
                continue
            command, answer = taken
            if command == {"name": "stop"}:
                answer.set_result(None)
                return
            seen.append(command)
            existing = isinstance(command, dict) and command.get("name") == "score"
            answer.set_result([]) if existing else answer.set_exception(DataError("no such command"))

    url = front.start()
    port = int(url.rpartition(":")[2])
    worker = threading.Thread(target=work, daemon=True)
    worker.start()

    def post(name: str) -> httpx.Response:
        headers = {"authorization": f"Bearer {TOKEN}"}
        return httpx.post(f"{url}/command", json={"name": name}, headers=headers, timeout=5, trust_env=False)

    def attempt(rng: random.Random) -> bool:
        command = damaged_document({"name": "score", "batch": "/a/b", "step": 3}, rng)
        token = rng.choice((TOKEN, TOKEN, None, "", "wrong", TOKEN[:-1]))
        raw = request(dumps(command), token)
        raw, whole = (raw, True) if rng.random() < 0.5 else (damaged_bytes(raw, rng), False)
        before = len(seen)
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=5) as connection:
            connection.sendall(raw)
            connection.shutdown(socket.SHUT_WR)
            connection.settimeout(5)
            status = connection.recv(65536).partition(b"\r\n")[0]
            expect(
                not whole or not status.startswith(b"HTTP/1.1 5"), f"a bad request is the service's fault: {status!r}"
            )
        if whole and token != TOKEN:
            expect(len(seen) == before, "a command without the token was carried out")
        after = post("score")
        expect(after.status_code == 200 and after.json() == {"result": []}, "the service no longer answers")
        return len(seen) > before + 1

    try:
        yield attempt
    finally:
        post("stop")
        worker.join(5)
        front.stop()
