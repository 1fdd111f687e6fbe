"""The trainer's client against a faulty service: invalid or slow replies, and incomplete error and address files."""

from __future__ import annotations

import json
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from armature.components.contracts.errors import ConfigurationError, TrainerError
from armature.components.machine.process import Program
from armature.components.training.client import read_address
from armature.components.training.processes import error_file, new_attempt
from armature.components.vlm.client import TrainerClient
from tests.builders import make_machine
from tests.vlm.conftest import Tiny


@contextmanager
def answering(client: TrainerClient, body: bytes, status: int = 200, pause: float = 0.0) -> Iterator[None]:
    """Connect `client` to a server that replies with `body`, at once or one byte after each `pause` in seconds."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def work() -> None:
            with suppress(OSError):
                while True:
                    connection, _ = listener.accept()
                    with connection:
                        connection.recv(2**16)
                        connection.sendall(f"HTTP/1.1 {status} OK\r\nContent-Length: {len(body)}\r\n\r\n".encode())
                        for start in range(len(body)) if pause else []:
                            connection.sendall(body[start : start + 1])
                            time.sleep(pause)
                        if not pause:
                            connection.sendall(body)

        threading.Thread(target=work, daemon=True).start()
        client._http.base_url = "http://127.0.0.1:{}".format(*listener.getsockname()[1:])  # type: ignore[assignment]
        client._program = Program([sys.executable, "-c", "import time; time.sleep(600)"], grace=1.0)
        try:
            yield
        finally:
            client._end_processes()


@pytest.fixture
def client(tiny: Tiny, tmp_path: Path) -> TrainerClient:
    return TrainerClient(tiny.policy(), make_machine(train_timeout=1.0), tmp_path / "trainer")


@pytest.mark.parametrize(
    "body",
    [
        *(b"", b"{", b"null", b"[]", b"\xff", b"[" * 100_000),
        *(b'{"result": null}', b'{"result": [1.0]}', b'{"result": {"loss": "x"}}', b'{"result": {"loss": null}}'),
        *(b"{}", b'{"error": null}', b'{"error": {"class": 1}}', b'{"error": {"class": "TrainerError"}}'),
    ],
)
def test_malformed_reply_raises_trainer_error(client: TrainerClient, body: bytes, tmp_path: Path) -> None:
    with answering(client, body), pytest.raises(TrainerError):
        client.step(1, tmp_path)


def test_slow_reply_hits_time_limit(client: TrainerClient, tmp_path: Path) -> None:
    began = time.monotonic()
    with answering(client, b'{"result": {"loss": 1.0}}' + b" " * 100, pause=0.2), pytest.raises(TrainerError):
        client.step(1, tmp_path)
    assert time.monotonic() - began < 8


def test_nan_metric_is_received(client: TrainerClient, tmp_path: Path) -> None:
    with answering(client, b'{"result": {"loss": "NaN", "steps": 2}}'):
        metrics = client.step(1, tmp_path)
    assert metrics["loss"] != metrics["loss"] and metrics["steps"] == 2


@pytest.mark.parametrize("written", ["", "{", "[]", "null", '{"class": "ConfigurationError", "what": "not th'])
def test_incomplete_error_file_is_ignored(client: TrainerClient, written: str) -> None:
    client.settings.workspace.mkdir()
    client._attempt = new_attempt(client.settings.workspace)
    file = error_file(client._attempt, 0)
    file.write_text(written)
    assert type(client._died("the trainer died")) is TrainerError
    file.write_text(json.dumps({"class": "ConfigurationError", "what": "not this"}))
    assert type(client._died("the trainer died")) is ConfigurationError


WHOLE = '{"url": "http://127.0.0.1:4321"}'


@pytest.mark.parametrize("length", range(len(WHOLE)))
def test_incomplete_address_file_is_ignored(length: int, tmp_path: Path) -> None:
    file = tmp_path / "address.json"
    assert read_address(file) is None
    file.write_text(WHOLE[:length])
    assert read_address(file) is None
    file.write_text(WHOLE)
    assert read_address(file) == "http://127.0.0.1:4321"
