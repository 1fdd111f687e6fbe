"""A worker that does whatever a test asks for. It is started as `python -m tests.machine.workers.misbehaving`."""

from __future__ import annotations

import ctypes
import inspect
import os
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from armature.components.contracts import errors
from armature.components.contracts.errors import ArmatureError
from armature.components.machine.workers.channel import serve


class OwnError(ArmatureError):
    """An error class that the calling process does not know."""


class Misbehaving:
    def __init__(self, start: int = 0, farewell: str = "") -> None:
        self.total, self.farewell = start, farewell

    def close(self) -> None:
        if self.farewell:
            Path(self.farewell).write_text("closed")

    def echo(self, value: Any) -> Any:
        print("whatever a simulator prints")
        return value

    def add(self, number: int) -> int:
        self.total += number
        return self.total

    def spread(self, values: list[Any], seconds: float) -> Iterator[Any]:
        for value in values:
            time.sleep(seconds)
            yield value

    def refuse_with(self, kind: str) -> None:
        result: type[ArmatureError] = OwnError if kind == "OwnError" else getattr(errors, kind)
        raise result("not this", where="here", remedy="that")

    def fail(self) -> None:
        raise LookupError("lost")

    def spread_and_fail(self) -> Iterator[int]:
        yield 1
        raise LookupError("lost")

    def send_object(self) -> object:
        return object()

    def leave(self, code: int) -> None:
        os._exit(code)

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def start_a_child(self) -> int:
        return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True).pid

    def write(self, data: str, then: str) -> None:
        """Bytes, in hexadecimal, into the socket; `then` what follows."""
        os.write(int(sys.argv[1]), bytes.fromhex(data))
        if then == "leave":
            os._exit(0)
        time.sleep(600)

    def write_slowly(self, text: str, seconds: float) -> None:
        """Write a JSON document into the socket byte by byte; NUMBER in it becomes the number of this request."""
        document = text.replace("NUMBER", str(request_number())).encode()
        for byte in struct.pack("<Q", len(document)) + document:
            os.write(int(sys.argv[1]), bytes([byte]))
            time.sleep(seconds)
        time.sleep(600)

    def write_endlessly(self, text: str) -> None:
        """The same JSON document again and again."""
        document = text.replace("NUMBER", str(request_number())).encode()
        while True:
            with suppress(BlockingIOError):
                os.write(int(sys.argv[1]), struct.pack("<Q", len(document)) + document)

    def write_later(self, text: str, seconds: float) -> int:
        """A JSON document once the reply was sent, and before the next request if that takes longer to come."""
        document = text.replace("NUMBER", str(request_number())).encode()
        data = struct.pack("<Q", len(document)) + document
        threading.Timer(seconds, os.write, (int(sys.argv[1]), data)).start()
        return 1

    def fork(self, child: str, seconds: float, how: str) -> int:
        """Fork by `how`. The child comes back after `seconds`, by a return or an error."""
        pid = FORKS[how]()
        if pid:
            return 1
        time.sleep(seconds)
        if child == "raise":
            raise LookupError("in the child")
        if child == "refuse":
            raise ArmatureError("in the child")
        if child == "exit":
            raise SystemExit(0)
        if child == "fork":
            os.fork()
        return 2

    def fork_and_leave(self, how: str) -> int:
        """Fork; the worker's process ends, and the child lives on."""
        if FORKS[how]():
            os._exit(7)
        os.setsid()
        time.sleep(600)
        return 2

    def fork_between(self, values: list[int]) -> Iterator[int]:
        """Fork before each value but the first."""
        for value in values:
            yield value
            os.fork()

    def deafen(self) -> None:
        """Read no request any more, once the reply is sent."""
        threading.Thread(target=_stop_main_thread, daemon=True).start()


def _stop_main_thread() -> None:
    time.sleep(0.2)
    os.kill(os.getpid(), signal.SIGSTOP)


def in_c() -> int:
    """A fork that no hook of Python's sees."""
    return int(ctypes.CDLL(None).fork())


FORKS: dict[str, Callable[[], int]] = {"python": os.fork, "c": in_c}


def request_number() -> int:
    """The number of the request that is answered, as a hostile handler could find it."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_code is not serve.__code__:
        frame = frame.f_back
    assert frame is not None
    return int(frame.f_locals["number"])


if __name__ == "__main__":
    serve(Misbehaving)
