"""One session of a server."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import aiohttp

from armature.components.contracts.episodes import Observation, Outcome
from armature.components.contracts.failures import RolloutFailed
from armature.components.contracts.secret_values import blanked
from armature.components.environments.openenv.messages import NoAction, action_of, shown
from armature.components.environments.openenv.settings import OpenEnvSettings

LARGEST_MESSAGE = 64 * 2**20
"""Bytes of one message of a server."""
CLOSING_SECONDS = 2.0
FIRST_WAIT, LONGEST_WAIT = 0.05, 1.0
"""Seconds between two attempts to get a session of a server whose sessions are all taken."""


class OpenEnvEpisode:
    """One WebSocket, which is one session: its environment is nobody else's."""

    def __init__(self, settings: OpenEnvSettings, url: str, headers: Mapping[str, str], seed: int) -> None:
        self._settings, self._headers, self._seed = settings, headers, seed
        self._url = f"ws{url.removeprefix('http').rstrip('/')}/ws"
        self._client: aiohttp.ClientSession | None = None
        self._socket: aiohttp.ClientWebSocketResponse | None = None
        self._rewarded = False

    async def reset(self) -> Observation:
        """Waits for a session where all are taken, as long as the call may take.

        Raises:
            RolloutFailed: see `_asked`; or the episode is over before it began.
        """
        self._client = aiohttp.ClientSession(headers=self._headers, trust_env=False)
        wait = FIRST_WAIT
        while True:
            self._socket = await self._opened()
            kind, data = await self._asked("reset", {**self._settings.reset, "seed": self._seed})
            if kind != "error" or data.get("code") != "CAPACITY_REACHED":
                break
            await self._socket.close()
            await asyncio.sleep(wait)
            wait = min(2 * wait, LONGEST_WAIT)
        observation, done, _ = self._read(kind, data)
        if done:
            raise RolloutFailed("environment_error", "the server says that the episode is over before it began")
        return observation

    async def step(self, action: str) -> Outcome:
        """
        Raises:
            RolloutFailed: see `_asked`; or `bad_reward`, see `_read`.
        """
        try:
            fields = action_of(action, self._settings)
        except NoAction:
            return self._invalid()
        kind, data = await self._asked("step", fields)
        if kind == "error" and data.get("code") == "VALIDATION_ERROR":
            return self._invalid()
        observation, done, reward = self._read(kind, data)
        parts = {} if reward is None else {"reward": reward}
        self._rewarded = self._rewarded or reward is not None
        if done and not self._rewarded:
            raise RolloutFailed("bad_reward", "the episode is over, and the server has given no reward")
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

    async def _opened(self) -> aiohttp.ClientWebSocketResponse:
        assert self._client is not None
        try:
            return await self._client.ws_connect(self._url, max_msg_size=LARGEST_MESSAGE, heartbeat=20.0)
        except (aiohttp.ClientError, OSError) as error:
            raise RolloutFailed("environment_error", f"{self._url} cannot be reached: {error}") from error

    async def _asked(self, kind: str, data: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
        """Kind and data of the server's answer.

        Raises:
            RolloutFailed: `environment_error`, the connection has ended, or the answer is not one of the protocol.
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
            raise _malformed(f"{blanked(message.data)[:200]!r} is no message")
        return str(answer.get("type")), answer["data"]

    def _read(self, kind: str, data: Mapping[str, Any]) -> tuple[Observation, bool, float | None]:
        """Observation, whether the episode is over, and the reward if there is one.

        Raises:
            RolloutFailed: the server says that it failed; a field is missing or of another type; or `bad_reward`.
        """
        if kind == "error":
            said = f"{data.get('code')}: {data.get('message')}"
            raise RolloutFailed("environment_error", f"the server failed: {said}")
        observation, done, reward = data.get("observation"), data.get("done"), data.get("reward")
        if kind != "observation" or not isinstance(observation, dict) or not isinstance(done, bool):
            raise _malformed(f"{kind!r:.40} with {sorted(data)[:10]} is no observation")
        if reward is not None and (not isinstance(reward, int | float) or not math.isfinite(reward)):
            raise RolloutFailed("bad_reward", f"the server's reward is {reward!r:.100}, not a finite number")
        value = None if reward is None else float(reward)
        if done:  # nobody is shown the last observation, which may lack what the others have
            return Observation(("",)), True, value
        return shown(observation, self._settings), False, value


def _malformed(what: str) -> RolloutFailed:
    return RolloutFailed("environment_error", f"the server's answer cannot be read: {what}")
