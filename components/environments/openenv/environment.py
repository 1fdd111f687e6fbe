"""The environment `openenv`, its sessions, and the server that a command starts on this machine."""

from __future__ import annotations

import asyncio
import json
import math
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

import aiohttp
import httpx

from armature.components.artifacts.sources import named_files
from armature.components.contracts.episodes import Episode, Observation, Outcome, Task
from armature.components.contracts.errors import ConfigurationError, RolloutFailed, blanked
from armature.components.contracts.secrets import resolve
from armature.components.environments.generated import GeneratedEnvironment
from armature.components.environments.openenv.messages import NoAction, action_of, to_observation
from armature.components.environments.openenv.settings import PORT, OpenEnvSettings
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


# --- A session of the server ---

LARGEST_MESSAGE = 64 * 2**20
"""Largest number of bytes in one message from a server."""
CLOSING_SECONDS = 2.0
"""Seconds that closing a session may take."""
FIRST_WAIT, LONGEST_WAIT = 0.05, 1.0
"""Seconds between attempts to open a session while all sessions of the server are in use; each wait doubles."""


class OpenEnvEpisode:
    """An episode in a session of its own: one WebSocket, for which the server makes one environment."""

    def __init__(self, settings: OpenEnvSettings, url: str, headers: Mapping[str, str], seed: int) -> None:
        self._settings, self._headers, self._seed = settings, headers, seed
        self._url = f"ws{url.removeprefix('http').rstrip('/')}/ws"
        self._client: aiohttp.ClientSession | None = None
        self._socket: aiohttp.ClientWebSocketResponse | None = None
        self._rewarded = False

    async def reset(self) -> Observation:
        """Open a session and return the first observation. While all sessions are in use, wait for one.

        Raises:
            RolloutFailed: the server failed, see `_request`, or the episode is over before the first step.
        """
        self._client = aiohttp.ClientSession(headers=self._headers, trust_env=False)
        wait = FIRST_WAIT
        while True:
            self._socket = await self._connect()
            kind, data = await self._request("reset", {**self._settings.reset, "seed": self._seed})
            if kind != "error" or data.get("code") != "CAPACITY_REACHED":
                break
            await self._socket.close()
            await asyncio.sleep(wait)
            wait = min(2 * wait, LONGEST_WAIT)
        observation, done, _ = self._read(kind, data)
        if done:
            raise RolloutFailed(
                "environment_error", "the server reports that the episode is over before the first step"
            )
        return observation

    async def step(self, action: str) -> Outcome:
        """Send the action that an answer contains and return the outcome. An answer without one ends the episode.

        Raises:
            RolloutFailed: the server failed, see `_request`, or gave no valid reward (`bad_reward`).
        """
        try:
            fields = action_of(action, self._settings)
        except NoAction:
            return self._invalid()
        kind, data = await self._request("step", fields)
        if kind == "error" and data.get("code") == "VALIDATION_ERROR":
            return self._invalid()
        observation, done, reward = self._read(kind, data)
        parts = {} if reward is None else {"reward": reward}
        self._rewarded = self._rewarded or reward is not None
        if done and not self._rewarded:
            raise RolloutFailed("bad_reward", "the episode is over and the server gave no reward in it")
        return Outcome(None if done else observation, parts)

    async def close(self) -> None:
        if self._socket is not None:
            with suppress(Exception):  # the server may be gone
                async with asyncio.timeout(CLOSING_SECONDS):
                    await self._socket.send_str('{"type": "close"}')
                    await self._socket.close()
        if self._client is not None:
            await self._client.close()

    def _invalid(self) -> Outcome:
        return Outcome(None, {"reward": self._settings.invalid_reward}, action_defect="format")

    async def _connect(self) -> aiohttp.ClientWebSocketResponse:
        assert self._client is not None
        try:
            return await self._client.ws_connect(self._url, max_msg_size=LARGEST_MESSAGE, heartbeat=20.0)
        except (aiohttp.ClientError, OSError) as error:
            raise RolloutFailed("environment_error", f"{self._url} cannot be reached: {error}") from error

    async def _request(self, kind: str, data: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
        """Send a message and return the kind and data of the server's answer.

        Raises:
            RolloutFailed: the connection has ended, or the answer does not follow the protocol (`environment_error`).
        """
        assert self._socket is not None
        try:
            await self._socket.send_str(json.dumps({"type": kind, "data": data}))
            message = await self._socket.receive()
        except (aiohttp.ClientError, OSError) as error:
            raise RolloutFailed("environment_error", f"the connection to the server has ended: {error}") from error
        if message.type is not aiohttp.WSMsgType.TEXT:
            what = f"{message.type.name}, {blanked(str(message.data))!r:.200}"
            raise RolloutFailed("environment_error", f"instead of answering {kind}, the server sent {what}")
        try:
            answer = json.loads(message.data)
        except (ValueError, RecursionError) as error:
            raise _malformed(f"it is not JSON: {error}") from error
        if not isinstance(answer, dict) or not isinstance(answer.get("data"), dict):
            raise _malformed(f"{blanked(message.data)[:200]!r} is not a message")
        return str(answer.get("type")), answer["data"]

    def _read(self, kind: str, data: Mapping[str, Any]) -> tuple[Observation, bool, float | None]:
        """Return the observation, True if the episode is over, and the reward or None.

        Raises:
            RolloutFailed: the server reports an error, a field is missing or has another type (`environment_error`),
                or the reward is not a finite number (`bad_reward`).
        """
        if kind == "error":
            raise RolloutFailed("environment_error", f"the server failed: {data.get('code')}: {data.get('message')}")
        observation, done, reward = data.get("observation"), data.get("done"), data.get("reward")
        if kind != "observation" or not isinstance(observation, dict) or not isinstance(done, bool):
            raise _malformed(f"{kind!r:.40} with {sorted(data)[:10]} is not an observation")
        if reward is not None and (not isinstance(reward, int | float) or not math.isfinite(reward)):
            raise RolloutFailed("bad_reward", f"the server's reward is {reward!r:.100}, not a finite number")
        value = None if reward is None else float(reward)
        if done:  # the policy does not see the last observation, so it may lack fields that others have
            return Observation(("",)), True, value
        return to_observation(observation, self._settings), False, value


def _malformed(what: str) -> RolloutFailed:
    return RolloutFailed("environment_error", f"the server's answer cannot be read: {what}")


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
        self.system_prompt = settings.system_prompt
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
        return OpenEnvEpisode(self.settings, url, self._headers, task.payload["seed"])

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
