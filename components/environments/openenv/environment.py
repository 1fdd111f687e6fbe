"""The environment `openenv`, and the server that a command starts on this machine."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

import httpx

from armature.components.artifacts.sources import named_files
from armature.components.contracts.episodes import Episode, Task
from armature.components.contracts.errors import ConfigurationError
from armature.components.contracts.secrets import resolve
from armature.components.environments.generated import GeneratedEnvironment
from armature.components.environments.openenv.session import OpenEnvEpisode
from armature.components.environments.openenv.settings import PORT, OpenEnvSettings
from armature.components.environments.openenv.tools import OpenEnvToolEpisode
from armature.components.machine.process import Program, Scratch
from armature.components.machine.project import project_folder
from armature.components.rewards.function import program_path

# --- The server that a command starts on this machine ---


class LocalServer:
    """A server process that starts at the first call of `url`, restarts if it has died, and ends with our process."""

    def __init__(self, command: Sequence[str], timeout: float) -> None:
        self._command, self._timeout = command, timeout
        self._lock = threading.Lock()
        self._program: Program | None = None
        self._port = 0
        self._failure: ConfigurationError | None = None
        self._scratch = Scratch()

    def url(self) -> str:
        """Start the server if it is not running and return its address.

        Raises:
            ConfigurationError: there is no such program, or the server did not start in time. Later calls raise the
                same error without another attempt.
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
            f"the OpenEnv server {what}: {self._program.tail(10)}",
            code="environment_server_failed",
            where="environment.args.command",
            remedy="the server has to listen on 127.0.0.1 and the port that replaces {port}",
        )

    def _listens(self) -> bool:
        if self._program is None or self._program.returncode is not None:
            return False
        try:
            socket.create_connection(("127.0.0.1", self._port), timeout=1.0).close()
        except OSError as error:  # refused: the process has just died; any other error: the server is busy
            return not isinstance(error, ConnectionRefusedError)
        return True

    def _end(self) -> None:
        if self._program is not None:
            self._program.stop()
            if self._program.log is not None:
                self._program.log.unlink(missing_ok=True)
            self._program = None


def free_port() -> int:
    """Return a free TCP port of this machine."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


# --- The environment ---

SEEDS = 2**31
"""Seeds are smaller than this number, because numpy's older generators accept no larger ones."""
SPACING = 1_000_003
"""Offset between task numbers of consecutive seeds: the tasks of seed s begin at s * SPACING."""


class OpenEnvEnvironment(GeneratedEnvironment[OpenEnvSettings]):
    """An environment on an OpenEnv server. A task is a seed for the server's reset; the server computes the reward."""

    name = "openenv"
    Settings: ClassVar[type[OpenEnvSettings]] = OpenEnvSettings

    def __init__(self, settings: OpenEnvSettings, **counts: int) -> None:
        super().__init__(settings, **counts)
        self.system_prompt = None if settings.own_tools else settings.system_prompt  # requests contain it
        self.max_turns = settings.max_turns
        self.reward_weights = {"reward": 1.0}
        self._headers: dict[str, str] = {}
        if settings.api_key is not None:
            key = resolve({"api_key": settings.api_key}, "environment.args")["api_key"]
            self._headers["Authorization"] = f"Bearer {key}"
        self._server = LocalServer(settings.command, settings.start_timeout) if settings.command else None

    @staticmethod
    def sources(settings: OpenEnvSettings) -> dict[str, str]:
        """Return digests of the local files in the settings `command` and `reset`.

        The code of a server that runs elsewhere cannot be read; the setting `revision` identifies it.
        """
        return named_files({"command": settings.command, "reset": settings.reset})

    def payload(self, seed: int, index: int) -> dict[str, Any]:
        """Return a seed below 2**31 for the server: even for training tasks, odd for held-out ones, as `seed` is."""
        return {"seed": (2 * (self._seed * SPACING + index) + seed % 2) % SEEDS}

    def episode(self, task: Task) -> Episode:
        url = self._server.url() if self._server is not None else str(self.settings.base_url)
        kind = OpenEnvToolEpisode if self.settings.own_tools else OpenEnvEpisode
        return kind(self.settings, url, self._headers, task.payload["seed"])

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
