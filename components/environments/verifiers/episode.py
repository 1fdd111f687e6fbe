"""Turns a loop that asks for messages into an episode that is stepped."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Any

from armature.components.contracts.episodes import Observation, Outcome
from armature.components.contracts.errors import DataError
from armature.components.contracts.images import EncodedImage
from armature.components.environments.verifiers.endpoint import ChatEndpoint, PendingRequest

Play = Callable[[str], Awaitable[Mapping[str, float]]]


class VerifiersEpisode:
    """`play(base_url)` runs the environment's loop against the endpoint there and returns its reward parts."""

    def __init__(self, play: Play, system_prompt: str | None) -> None:
        self._play, self._system_prompt = play, system_prompt
        self._endpoint = ChatEndpoint()
        self._loop: asyncio.Future[Mapping[str, float]] | None = None
        self._asked: PendingRequest | None = None
        self._seen: list[dict[str, Any]] = []

    async def reset(self) -> Observation:
        self._loop = asyncio.ensure_future(self._play(await self._endpoint.start()))
        observation = (await self._advance()).observation
        if observation is None:
            raise ValueError("the environment ended the episode before it asked for anything")
        return observation

    async def step(self, action: str) -> Outcome:
        assert self._asked is not None
        self._seen = [*self._asked.messages, {"role": "assistant", "content": action}]
        self._asked.answer.set_result(action)
        return await self._advance()

    async def close(self) -> None:
        self._endpoint.close()
        if self._loop is not None and not self._loop.done():
            self._loop.cancel()
            with suppress(asyncio.CancelledError):
                await self._loop

    async def _advance(self) -> Outcome:
        """Wait until the loop asks again or ends."""
        assert self._loop is not None
        request = asyncio.ensure_future(self._endpoint.next())
        try:
            either: list[asyncio.Future[Any]] = [request, self._loop]
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if not request.done():
                return Outcome(None, await self._loop)
            self._asked = request.result()
        finally:
            request.cancel()
        return Outcome(Observation(self._unseen(self._asked.messages)))

    def _unseen(self, messages: list[dict[str, Any]]) -> tuple[str | EncodedImage, ...]:
        """What the environment said since the last turn.

        Raises:
            ValueError: it changed what was said before, or spoke otherwise than as the user.
        """
        if not self._seen:
            system = [message for message in messages[:1] if message["role"] == "system"]
            if [content(message) for message in system] != ([(self._system_prompt,)] if self._system_prompt else []):
                raise ValueError("the system prompt is not the same for all tasks, which the bridge does not support")
            self._seen = system
        old, new = messages[: len(self._seen)], messages[len(self._seen) :]
        if [_essence(message) for message in old] != [_essence(message) for message in self._seen]:
            raise ValueError("the environment rewrote earlier messages, which the bridge does not support")
        roles = {message["role"] for message in new}
        if roles != {"user"}:
            raise ValueError(
                f"the environment sent messages as {sorted(roles - {'user'})}; the bridge supports user messages"
            )
        return tuple(part for message in new for part in content(message))


def content(message: Mapping[str, Any]) -> tuple[str | EncodedImage, ...]:
    """A message's text and images in order.

    Raises:
        ValueError: an image is not inline (none is fetched), or a part is neither text nor image.
    """
    if message["content"] is None or isinstance(message["content"], str):
        return (message["content"] or "",)
    return tuple(_part(part) for part in message["content"])


def _part(part: Mapping[str, Any]) -> str | EncodedImage:
    if part["type"] == "text":
        return str(part["text"])
    if part["type"] != "image_url":
        raise ValueError(f"a message holds {part['type']!r}; the bridge supports text and images")
    try:
        return EncodedImage.from_url(str(part["image_url"]["url"]))
    except DataError as error:
        raise ValueError(str(error)) from error


def _essence(message: Mapping[str, Any]) -> tuple[str, tuple[str | EncodedImage, ...]]:
    return message["role"], content(message)
