"""The caller's side of a worker in a local process, which is watched, ended and restarted."""

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
from typing import Annotated, Any, Self

from pydantic import Field, TypeAdapter

from armature.components.contracts.errors import ArmatureError
from armature.components.machine.process import Program
from armature.components.machine.workers.channel import MOST_BYTES, CallLimits, IdleWorkerLost, WorkerError, encoded
from armature.components.machine.workers.requests import ANYTHING, HandlerFailed, PartT, ReplyT, Requests, new_number

GRACE = 3.0
"""Seconds for an idle worker to exit by itself."""

_ROOT = Path(__file__).parents[4]
_FOREIGN = (
    "import runpy, sys; sys.path.append(sys.argv[1]); del sys.argv[:2]; runpy.run_module(sys.argv[0], None, '__main__')"
)
"""Program that runs a module in another environment, whose own packages come before those beside our code."""
_PID: TypeAdapter[int] = TypeAdapter(Annotated[int, Field(strict=True, gt=0)])


def importable() -> dict[str, str]:
    """Return PYTHONPATH as an environment for a child process, which then can import this code from any folder."""
    return {"PYTHONPATH": os.pathsep.join([str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])}


class WorkerProcess:
    """A `Worker` in a child process. The process starts with the first call, and with the first call after it ended.

    Threads may share a worker; their calls run one after the other.
    """

    def __init__(
        self,
        module: str,
        settings: Mapping[str, Any] | None = None,
        *,
        timeout: float,
        env: Mapping[str, str | None] | None = None,
        most_bytes: int = MOST_BYTES,
        python: str | None = None,
    ) -> None:
        """
        Args: see `make_worker`.
            python: interpreter of another environment, whose packages the module then imports; None: this one.
        """
        self._module, self._settings, self._timeout = module, encoded(dict(settings or {})), timeout
        self._most_bytes, self._python = most_bytes, python
        threads = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        paths: dict[str, str | None] = {**importable()} if python is None else {"PYTHONPATH": None}
        self._env = {**paths, **threads, **(env or {})}
        self._lock = threading.Lock()
        self._program: Program | None = None
        self._requests: Requests
        self.pid: int | None = None
        """PID of the process while it runs, else None."""
        self.starts = 0
        """Number of processes that were started."""

    @property
    def alive(self) -> bool:
        """See `Worker.alive`."""
        return self.pid is not None

    def call(self, method: str, *arguments: Any, reply: TypeAdapter[ReplyT], timeout: float | None = None) -> ReplyT:
        """See `Worker.call`."""
        return self.stream(method, *arguments, part=ANYTHING, most_parts=0, reply=reply, timeout=timeout)[1]

    def stream(
        self,
        method: str,
        *arguments: Any,
        part: TypeAdapter[PartT],
        most_parts: int,
        reply: TypeAdapter[ReplyT],
        timeout: float | None = None,
    ) -> tuple[list[PartT], ReplyT]:
        """See `Worker.stream`."""
        timeout = self._timeout if timeout is None else timeout
        with self._lock:
            number = new_number()
            request = encoded([number, method, arguments])
            limits = CallLimits(timeout, self._most_bytes)
            try:
                if self._program is None:
                    self._start(limits)
                else:
                    self._refuse_lost()
                return self._requests.ask(number, request, limits, reply, part, most_parts)
            except ArmatureError:
                raise
            except BaseException as error:
                who = f"process {self.pid}" if self.pid else f"start of {self._module}"
                lost = self._lost(error, timeout, f"{who}, {method}{reprlib.repr(arguments)}")
                if lost is None:
                    raise
                raise lost from error

    def close(self) -> None:
        """See `Worker.close`."""
        if self._lock.acquire(blocking=False):
            try:
                self._end(GRACE)
            finally:
                self._lock.release()
        elif program := self._program:  # a thread that waits for an answer then gets an error
            program.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self, limits: CallLimits) -> None:
        ours, theirs = socket.socketpair()
        self._requests = Requests(ours)
        with theirs:
            command = [sys.executable, "-m", self._module, str(theirs.fileno())]
            if self._python is not None:
                command = [self._python, "-P", "-c", _FOREIGN, str(_ROOT), *command[2:]]
            self._program = Program(command, env=self._env, grace=1.0, pass_fds=[theirs.fileno()])
        self.starts += 1
        number = new_number()
        try:
            self.pid = self._requests.ask(number, encoded(number) + self._settings, limits, _PID, ANYTHING, 0)[1]
        except ArmatureError as error:
            raise ValueError(f"it refused to start: {error}") from error

    def _refuse_lost(self) -> None:
        """Check that an idle process still runs and has sent nothing.

        Raises:
            IdleWorkerLost: the process has ended, or has sent data without a request.
        """
        byte = self._requests.unread()
        if byte is None:
            return
        where, code = f"process {self.pid}", self._end(0.0 if byte else GRACE)
        what = "the process answered without a request" if byte else f"the process ended with code {code}"
        raise IdleWorkerLost(what, where=where)

    def _lost(self, error: BaseException, timeout: float, where: str) -> WorkerError | None:
        """End the process after `error`, and return the WorkerError to raise in its place.

        Return None if the worker did not cause `error`, such as a KeyboardInterrupt.
        """
        running = self._program is not None
        code = self._end(GRACE if isinstance(error, EOFError | ConnectionError) else 0.0)
        match error:
            case TimeoutError():
                return WorkerError(f"no answer within {timeout:g} s", code="worker_timeout", where=where)
            case EOFError() | OSError() if running:
                return WorkerError(f"the process ended with code {code}", code="worker_ended", where=where)
            case HandlerFailed():
                return WorkerError(f"the worker failed: {error}", where=where)
            case ValueError():
                return WorkerError(
                    f"the worker's answer cannot be read: {error!s:.500}", code="worker_reply_invalid", where=where
                )
        return None

    def _end(self, patience: float = 0.0) -> int | None:
        """End the process and return its exit code; None if no process runs.

        The process first has `patience` seconds to exit by itself.
        """
        program, self._program, self.pid = self._program, None, None
        if program is None:
            return None
        if patience:
            self._requests.close()
            with suppress(subprocess.TimeoutExpired):
                program.wait(patience)
        code = program.stop()
        self._requests.close()
        return code
