"""Asks servers whose weights somebody keeps current: a pool in its own process, or workers that it lends them to."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

from armature.components.inference.answers import AnswerLimits, read_completions
from armature.components.inference.client import (
    Completion,
    GenerationFailure,
    Message,
    Sampling,
    TransientError,
    ask,
    open_session,
    refuse_placeholders,
    request_body,
)
from armature.components.inference.merge import RequestMerger
from armature.components.inference.replica import Replica
from armature.components.inference.routing import Router

Prove = Callable[[Replica, str, str], Awaitable[None]]
"""See `ServedWeights.prove`: of a replica, its mark before the request was sent, and that of the answer."""


class PoolRequests:
    """A `Generator` between `open` and `aclose`; all calls have to come from one event loop.

    Args:
        limits: what servers can answer with; its `forbidden` tokens are never sampled.
        timeout: seconds for one request.
        prove: raises TransientError where an answer is not of the weights that the server should have.
        failed: is told of an attempt that failed, unless the replica has been given other weights since.
    """

    def __init__(
        self,
        router: Router,
        limits: AnswerLimits,
        timeout: float,
        prove: Prove,
        failed: Callable[[Replica, TransientError], None],
    ) -> None:
        self._router, self._limits, self._timeout = router, limits, timeout
        self._prove, self._failed = prove, failed
        self._merger = RequestMerger(self.sample)

    def open(self) -> None:
        self._session = open_session()

    async def aclose(self) -> None:
        await self._session.close()

    async def complete(self, messages: Sequence[Message], sampling: Sampling, seed: int) -> Completion:
        """See `ServerPool.complete`."""
        return await self._merger.complete(messages, sampling, seed)

    async def sample(
        self, messages: Sequence[Message], sampling: Sampling, seed: int, n: int
    ) -> list[Completion | GenerationFailure]:
        """See `ServerPool.sample`."""
        body = request_body(messages, sampling, seed, n, sorted(self._limits.forbidden))
        statistics = self._router.statistics
        async with self._router.admitted():
            began = time.monotonic()
            try:
                refuse_placeholders(messages, self._limits.placeholders)
                read = await self._router.answered(lambda replica: self._attempt(replica, body, n, sampling.max_tokens))
                results = read()
            except GenerationFailure as failure:
                statistics.failed(failure.reason, n)
                raise
            statistics.answered(results, time.monotonic() - began)
            return results

    async def _attempt(
        self, replica: Replica, body: dict[str, object], n: int, max_tokens: int
    ) -> Callable[[], list[Completion | GenerationFailure]]:
        """What reads the answer, for which the server is not kept."""
        began, version, mark = time.monotonic(), replica.version, replica.mark
        try:
            limit = self._limits.answer_bytes(n, max_tokens)
            named = body | {"model": replica.model}
            answer = await ask(self._session, replica.endpoint, named, self._timeout, limit)
            await self._prove(replica, mark, answer.weights)
            self._router.statistics.continued += n * (answer.weights != mark)
        except TransientError as error:
            if replica.version == version:
                self._failed(replica, error)
            raise
        return partial(
            read_completions,
            answer.document,
            self._limits,
            n=n,
            max_tokens=max_tokens,
            version=version,
            server=replica.name,
            seconds=time.monotonic() - began,
        )
