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
        """Write bytes, given in hexadecimal, into the socket. Then end the process if `then` is "leave", and hang if
        not."""
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
        """Write the same JSON document into the socket again and again. NUMBER in it becomes the number of this
        request."""
        document = text.replace("NUMBER", str(request_number())).encode()
        while True:
            with suppress(BlockingIOError):
                os.write(int(sys.argv[1]), struct.pack("<Q", len(document)) + document)

    def write_later(self, text: str, seconds: float) -> int:
        """Reply, and write a JSON document into the socket `seconds` later, while no request may be waiting."""
        document = text.replace("NUMBER", str(request_number())).encode()
        data = struct.pack("<Q", len(document)) + document
        threading.Timer(seconds, os.write, (int(sys.argv[1]), data)).start()
        return 1

    def fork(self, child: str, seconds: float, how: str) -> int:
        """Fork with the function `FORKS[how]`. The parent returns at once. After `seconds`, the child returns too, or
        does what `child` says, such as raising an error."""
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
        """Fork. The worker's process ends at once, and the child lives on."""
        if FORKS[how]():
            os._exit(7)
        os.setsid()
        time.sleep(600)
        return 2

    def fork_between(self, values: list[int]) -> Iterator[int]:
        """Yield the values, and fork after each of them. The child processes go through the rest too."""
        for value in values:
            yield value
            os.fork()

    def deafen(self) -> None:
        """Reply, and stop the process 0.2 s later, so that it never reads another request."""
        threading.Thread(target=_stop_main_thread, daemon=True).start()


def _stop_main_thread() -> None:
    time.sleep(0.2)
    os.kill(os.getpid(), signal.SIGSTOP)


def in_c() -> int:
    """Fork by calling the C library. Python's fork hooks do not run."""
    return int(ctypes.CDLL(None).fork())


FORKS: dict[str, Callable[[], int]] = {"python": os.fork, "c": in_c}


def request_number() -> int:
    """Return the number of the request that is being answered. It is read from the caller's stack frame, as a hostile
    handler could do."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_code is not serve.__code__:
        frame = frame.f_back
    assert frame is not None
    return int(frame.f_locals["number"])


if __name__ == "__main__":
    serve(Misbehaving)
