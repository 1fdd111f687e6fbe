"""An episode around a loop that requests messages from a chat endpoint."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Any

from armature.components.contracts.episodes import ChatAnswer, Observation, Outcome
from armature.components.contracts.errors import RolloutFailed
from armature.components.environments.gateway.server import ChatGateway, PendingRequest

Play = Callable[[str, ChatGateway], Awaitable[Mapping[str, float]]]
"""A loop that is given a base URL and its gateway, and returns reward parts. The gateway has the key."""


class GatewayEpisode:
    """An episode around `play(base_url, gateway)`, whose requests become observations.

    Requests are answered one after the other.

    Args:
        most: number of requests that are answered; None: no limit.
    """

    def __init__(self, play: Play, most: int | None = None) -> None:
        self._play, self._gateway = play, ChatGateway(most)
        self._playing: asyncio.Future[Mapping[str, float]] | None = None
        self._pending: PendingRequest | None = None

    async def reset(self) -> Observation:
        """Start the loop and return its first request.

        Raises:
            RolloutFailed: `no_completion`: the loop ended without any request.
        """
        url = await self._gateway.start()
        self._playing = asyncio.ensure_future(self._play(url, self._gateway))
        outcome = await self._advance()
        if outcome.observation is None:
            detail = ", ".join(sorted(name for name, value in outcome.reward_parts.items() if value))
            raise RolloutFailed("no_completion", f"it ended without a request that could be answered; {detail}")
        return outcome.observation

    async def step(self, action: str) -> Outcome:
        return await self.answer(ChatAnswer(action))

    async def answer(self, answer: ChatAnswer) -> Outcome:
        assert self._pending is not None
        if not self._pending.answer.done():
            self._pending.answer.set_result(answer)
        return await self._advance()

    async def close(self) -> None:
        if self._playing is not None and not self._playing.done():
            self._playing.cancel()
            with suppress(asyncio.CancelledError):
                await self._playing
        await self._gateway.close()

    async def _advance(self) -> Outcome:
        """Wait until the loop sends another request or ends, and return the outcome."""
        assert self._playing is not None
        request = asyncio.ensure_future(self._gateway.next())
        try:
            either: list[asyncio.Future[Any]] = [request, self._playing]
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if self._playing.done():
                return Outcome(None, self._playing.result())
            self._pending = request.result()
        finally:
            request.cancel()
        asked = self._pending.request
        return Outcome(Observation(asked.messages[-1].content, request=asked))
