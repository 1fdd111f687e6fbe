"""A model server on the virtual clock: continuous batching of requests."""

from __future__ import annotations

import asyncio
import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from armature.components.inference.client import TransientError
from armature.components.planning.costs import ServerCosts


@dataclass(order=True)
class _Sequence:
    """`ends`: the forward pass of the server, counted from its start, that gives the last token."""

    ends: float
    number: int
    context: float = field(compare=False)
    answer: asyncio.Future[None] = field(compare=False)


class SimulatedServer:
    """Decodes up to `costs.slots` sequences at once; a pass takes longer the more there are.

    A prompt is computed by itself, and the others wait for it. `busy`: seconds with something to do, `decoded`: the
    sum over them of the sequences that were decoded.
    """

    def __init__(self, costs: ServerCosts) -> None:
        self._costs = costs
        self._running: list[_Sequence] = []
        self._waiting: deque[tuple[int, int, float, asyncio.Future[None]]] = deque()
        self._passes = self._context = self._prefill = self._at = 0.0
        self._number = 0
        self._timer: asyncio.TimerHandle | None = None
        self.busy = self.decoded = 0.0

    async def answer(self, new_tokens: int, context: float, completions: Sequence[int]) -> None:
        """One request: a prompt of which `new_tokens` are not cached, and as many samples as `completions`.

        Raises:
            TransientError: the server died.
        """
        loop = asyncio.get_running_loop()
        answers: list[asyncio.Future[None]] = []
        for place, tokens in enumerate(completions):
            answers.append(loop.create_future())
            self._waiting.append((0 if place else new_tokens, tokens, context + tokens / 2, answers[-1]))
        self._go_on()
        await asyncio.gather(*answers)

    def die(self) -> None:
        """Every request fails."""
        self.advance(asyncio.get_running_loop().time())
        lost = [one.answer for one in self._running] + [one[3] for one in self._waiting]
        self._running, self._context, self._prefill = [], 0.0, 0.0
        self._waiting.clear()
        for answer in lost:
            if not answer.done():
                answer.set_exception(TransientError("connection_lost", "the server died"))
        self._go_on()

    def pause(self, seconds: float) -> None:
        """What is decoded stands still for so long; then its contexts are recomputed."""
        if self._running:
            self.advance(asyncio.get_running_loop().time())
            self._prefill += seconds + self._context * self._costs.token_seconds
            self._go_on()

    def _pass_seconds(self) -> float:
        costs = self._costs
        return (
            costs.pass_seconds + costs.token_seconds * len(self._running) + costs.context_token_seconds * self._context
        )

    def advance(self, now: float) -> None:
        """Count what was done until `now`."""
        passed, self._at = now - self._at, now
        if not self._running:
            return
        self.busy += passed
        self.decoded += passed * len(self._running)
        prefilled = min(passed, self._prefill)
        self._prefill -= prefilled
        seconds = self._pass_seconds()
        self._passes += (passed - prefilled) / seconds if seconds else 0.0

    def _go_on(self, finished: _Sequence | None = None) -> None:
        self.advance(asyncio.get_running_loop().time())
        if finished is not None:
            self._passes = max(self._passes, finished.ends)
        while self._running and self._running[0].ends <= self._passes + 1e-9:
            one = heapq.heappop(self._running)
            self._context -= one.context
            if not one.answer.done():
                one.answer.set_result(None)
        while self._waiting and len(self._running) < self._costs.slots:
            new_tokens, tokens, context, answer = self._waiting.popleft()
            self._prefill += new_tokens * self._costs.token_seconds
            self._number += 1
            heapq.heappush(self._running, _Sequence(self._passes + tokens, self._number, context, answer))
            self._context += context
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._running:
            first = self._running[0]
            left = self._prefill + (first.ends - self._passes) * self._pass_seconds()
            self._timer = asyncio.get_running_loop().call_later(left, self._go_on, first)
