"""An episode in a session of an OpenEnv server."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import aiohttp

from armature.components.contracts.episodes import Observation, Outcome
from armature.components.contracts.errors import RolloutFailed, blanked
from armature.components.environments.openenv.messages import NoAction, action_of, to_observation
from armature.components.environments.openenv.settings import OpenEnvSettings

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
            raise malformed(f"it is not JSON: {error}") from error
        if not isinstance(answer, dict) or not isinstance(answer.get("data"), dict):
            raise malformed(f"{blanked(message.data)[:200]!r} is not a message")
        return str(answer.get("type")), answer["data"]

    def _fields(self, kind: str, data: Mapping[str, Any]) -> tuple[Mapping[str, Any], bool, float | None]:
        """Return the observation's fields, True if the episode is over, and the reward or None.

        Raises:
            RolloutFailed: the server reports an error, a field is missing or has another type (`environment_error`),
                or the reward is not a finite number (`bad_reward`).
        """
        if kind == "error":
            raise RolloutFailed("environment_error", f"the server failed: {data.get('code')}: {data.get('message')}")
        observation, done, reward = data.get("observation"), data.get("done"), data.get("reward")
        if kind != "observation" or not isinstance(observation, dict) or not isinstance(done, bool):
            raise malformed(f"{kind!r:.40} with {sorted(data)[:10]} is not an observation")
        if reward is not None and (not isinstance(reward, int | float) or not math.isfinite(reward)):
            raise RolloutFailed("bad_reward", f"the server's reward is {reward!r:.100}, not a finite number")
        return observation, done, None if reward is None else float(reward)

    def _read(self, kind: str, data: Mapping[str, Any]) -> tuple[Observation, bool, float | None]:
        """Return what `_fields` returns, with the observation for the policy.

        Raises:
            RolloutFailed: as `_fields`, or the fields do not fill the prompt (`environment_error`, `bad_image`).
        """
        fields, done, reward = self._fields(kind, data)
        # The policy does not see the last observation, so it may lack fields that others have.
        return Observation(("",)) if done else to_observation(fields, self._settings), done, reward


def malformed(what: str) -> RolloutFailed:
    """Return the failure of a rollout whose server answers outside of the protocol."""
    return RolloutFailed("environment_error", f"the server's answer cannot be read: {what}")
