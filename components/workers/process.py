"""The caller's side: a worker in a process that is watched, ended and started again."""

from __future__ import annotations

import os
import reprlib
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from components.process import Program
from components.workers.channel import Channel, encoded
from components.workers.errors import WorkerError, restored

GRACE = 3.0
"""Seconds that an idle worker has to leave by itself."""

_ROOT = Path(__file__).parents[2]


def importable() -> dict[str, str]:
    """The variable with which a child process finds our code, wherever it starts."""
    return {"PYTHONPATH": os.pathsep.join([str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])}


class WorkerProcess:
    """A `Worker` in a child process, which starts with the first call, and again with the first after an end.

    Safe to share between threads, which wait for one another.
    """

    def __init__(
        self,
        module: str,
        settings: Mapping[str, Any] | None = None,
        *,
        timeout: float,
        env: Mapping[str, str | None] | None = None,
    ) -> None:
        """
        Args: see `make_worker`.
        """
        self._module, self._settings, self._timeout = module, encoded(dict(settings or {})), timeout
        threads = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        self._env = {**importable(), **threads, **(env or {})}
        self._lock = threading.Lock()
        self._program: Program | None = None
        self._channel: Channel
        self.pid: int | None = None
        """Of the process, while there is one."""
        self.starts = 0
        """How many processes there have been."""

    @property
    def alive(self) -> bool:
        """See `Worker.alive`."""
        return self.pid is not None

    def call(self, method: str, *arguments: Any, timeout: float | None = None) -> Any:
        """See `Worker.call`."""
        timeout = self._timeout if timeout is None else timeout
        request = encoded([method, arguments])
        with self._lock:
            try:
                if self._program is None:
                    self._start(timeout)
                value = self._exchange(request, timeout)
            except BaseException as error:
                who = f"process {self.pid}" if self.pid else f"start of {self._module}"
                where = f"{who}, {method}{reprlib.repr(arguments)}"
                what = self._lost(error, timeout)
                if what is None:
                    raise
                raise WorkerError(what, where=where) from error
        if isinstance(value, Exception):
            raise value
        return value

    def close(self) -> None:
        """See `Worker.close`."""
        if self._lock.acquire(blocking=False):
            try:
                self._end(GRACE)
            finally:
                self._lock.release()
        elif program := self._program:  # who waits for its answer sees the end
            program.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self, timeout: float) -> None:
        ours, theirs = socket.socketpair()
        self._channel = Channel(ours)
        with theirs:
            command = [sys.executable, "-m", self._module, str(theirs.fileno())]
            self._program = Program(command, env=self._env, grace=1.0, pass_fds=[theirs.fileno()])
        self.starts += 1
        self._channel.send(self._settings, timeout)
        self.pid = _number(self._channel.receive(timeout))

    def _exchange(self, request: bytes, timeout: float) -> Any:
        """The answer, or the handler's error. Raises `_Failed`, and what `Channel` raises."""
        self._channel.send(request, timeout)
        parts: list[Any] = []
        while True:
            kind, value = self._channel.receive(timeout)
            match kind:
                case "part":
                    parts.append(value)
                case "end":
                    return parts
                case "done":
                    return value
                case "refused":
                    return restored(value)
                case "failed":
                    raise _Failed(value)
                case _:
                    raise ValueError(f"an answer of the kind {kind!r:.40}")

    def _lost(self, error: BaseException, timeout: float) -> str | None:
        """End the process after `error`. What became of it; None where the error says that."""
        running = self._program is not None
        code = self._end(GRACE if isinstance(error, EOFError | ConnectionError) else 0.0)
        match error:
            case TimeoutError():
                return f"no answer within {timeout:g} s"
            case EOFError() | OSError() if running:
                return f"the process ended with code {code}"
            case _Failed():
                return f"the worker failed: {error}"
            case ValueError() | TypeError():
                return f"the worker's answer cannot be read: {error!r:.500}"
        return None

    def _end(self, patience: float = 0.0) -> int | None:
        """The exit code of the process, which may leave by itself for `patience` seconds."""
        program, self._program, self.pid = self._program, None, None
        if program is None:
            return None
        if patience:
            self._channel.close()
            with suppress(subprocess.TimeoutExpired):
                program.wait(patience)
        code = program.stop()
        self._channel.close()
        return code


class _Failed(Exception):
    """The handler raised what is no ArmatureError."""


def _number(value: Any) -> int:
    if type(value) is not int:
        raise ValueError(f"{value!r:.100} is not the number of a process")
    return value
