"""A worker that does whatever a test asks for. It is started as `python -m tests.workers.misbehaving`."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from components.contracts import errors
from components.contracts.errors import ArmatureError
from components.workers.serve import serve


class OwnError(ArmatureError):
    """Of a kind that the other side does not know."""


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
        found: type[ArmatureError] = OwnError if kind == "OwnError" else getattr(errors, kind)
        raise found("not this", where="here", remedy="that")

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


if __name__ == "__main__":
    serve(Misbehaving)
