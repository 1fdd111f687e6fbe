"""The first request of a group: its members are shown the same, so one request samples for all of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from components.inference.client import Completion, GenerationFailure
from components.rollouts.generator import Generator

if TYPE_CHECKING:
    from components.inference.settings import EvaluationSamplingSettings, SamplingSettings

Messages = list[dict[str, Any]]


class Opening:
    """Waits until each of `size` members has asked or left, then asks once for all that ask the same.

    The server then expands the prompt and encodes its images once. A member that is shown something else than
    the others (an environment may draw lots) has a request of its own. All members have to run at the same time.
    """

    def __init__(
        self,
        pool: Generator,
        sampling: SamplingSettings | EvaluationSamplingSettings,
        seed_of: Callable[[int], int],
        size: int,
    ) -> None:
        self._pool, self._sampling, self._seed_of = pool, sampling, seed_of
        self._to_come = set(range(size))
        self._asked: dict[int, tuple[Messages, asyncio.Future[Completion]]] = {}

    async def ask(self, member: int, messages: Messages) -> Completion:
        """What the policy answers this member.

        Raises:
            GenerationFailure: this member's answer, or the whole request, failed.
        """
        answer = asyncio.get_running_loop().create_future()
        self._asked[member] = (messages, answer)
        await self.leave(member)
        return await answer

    async def leave(self, member: int) -> None:
        """Do not wait for this member (any more)."""
        if member in self._to_come:
            self._to_come.remove(member)
            if not self._to_come:
                await self._send()

    async def _send(self) -> None:
        batches: list[tuple[Messages, list[int]]] = []
        for member in sorted(self._asked):
            messages, answer = self._asked[member]
            if answer.cancelled():
                continue
            same = next((members for other, members in batches if other == messages), None)
            if same is None:
                batches.append((messages, [member]))
            else:
                same.append(member)
        await asyncio.gather(*(self._sample(messages, members) for messages, members in batches))

    async def _sample(self, messages: Messages, members: list[int]) -> None:
        results: list[Completion | GenerationFailure]
        try:
            results = await self._pool.sample(messages, self._sampling, self._seed_of(members[0]), len(members))
        except GenerationFailure as failure:
            results = [failure] * len(members)
        for member, result in zip(members, results, strict=True):
            answer = self._asked[member][1]
            if answer.cancelled():
                continue
            if isinstance(result, GenerationFailure):
                answer.set_exception(result)
            else:
                answer.set_result(result)
