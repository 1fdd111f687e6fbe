"""The server that a command starts on this machine."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import httpx

from armature.components.contracts.errors import ConfigurationError
from armature.components.environments.openenv.settings import PORT
from armature.components.process import Program, Scratch
from armature.components.project import project_folder
from armature.components.rewards.command import program_path


class LocalServer:
    """Started when it is first asked for, and again when it has died. It ends with us, however we end."""

    def __init__(self, command: Sequence[str], timeout: float) -> None:
        self._command, self._timeout = command, timeout
        self._lock = threading.Lock()
        self._program: Program | None = None
        self._port = 0
        self._failure: ConfigurationError | None = None
        self._scratch = Scratch()

    def url(self) -> str:
        """Its address, once it answers.

        Raises:
            ConfigurationError: there is no such program, or it has not come up in time; it is not tried again.
        """
        with self._lock:
            if self._failure is not None:
                raise self._failure
            if not self._listens():
                self._end()
                try:
                    self._start()
                except ConfigurationError as failure:
                    self._failure = failure
                    self._end()
                    raise
            return f"http://127.0.0.1:{self._port}"

    def close(self) -> None:
        with self._lock:
            self._end()
            self._scratch.cleanup()

    def _start(self) -> None:
        folder = project_folder().resolve()
        self._port = free_port()
        program, *arguments = (word.replace(PORT, str(self._port)) for word in self._command)
        log = Path(self._scratch.name, "server.log")
        self._program = Program([program_path(program, folder), *arguments], log=log, cwd=folder)
        deadline = time.monotonic() + self._timeout
        with httpx.Client(trust_env=False, timeout=5.0) as client:
            while self._program.returncode is None and time.monotonic() < deadline:
                with suppress(httpx.HTTPError):
                    if client.get(f"http://127.0.0.1:{self._port}/health").status_code == httpx.codes.OK:
                        return
                time.sleep(0.1)
        code = self._program.returncode
        what = f"does not answer on /health after {self._timeout:g} s" if code is None else f"ended with code {code}"
        raise ConfigurationError(
            f"the server of OpenEnv {what}: {self._program.tail(10)}",
            code="environment_server_failed",
            where="environment.args.command",
            remedy="it has to listen on 127.0.0.1 and the port that {port} is replaced by",
        )

    def _listens(self) -> bool:
        if self._program is None or self._program.returncode is not None:
            return False
        try:
            socket.create_connection(("127.0.0.1", self._port), timeout=1.0).close()
        except ConnectionRefusedError:  # it has just died
            return False
        except OSError:  # it is busy
            return True
        return True

    def _end(self) -> None:
        if self._program is not None:
            self._program.stop()
            if self._program.log is not None:
                self._program.log.unlink(missing_ok=True)
            self._program = None


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])
