"""Check that servers are deterministic: an answer's bits depend on its request and the weights, not on the batch.

The batch of a request depends on when other requests arrive, and so on the load of the machine. On CPU, the batch
influences vLLM's results in three places:

- Attention with several threads splits the keys of a decoded token into parts, and adds up the parts, if there are too
  few requests to keep all threads busy. `VLLM_CPU_ATTN_SPLIT_KV=0` turns this off.
- The images of all requests in a step are encoded as one batch, in which MKL's matrix products round differently. Our
  plug-in encodes each image alone (`armature_served.images`).
- On some processors, oneDNN's matrix products with a wide inner dimension round differently for one row than for
  several. Nothing turns this off: such a server is refused.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import httpx
import numpy as np

from armature.components.contracts.errors import ServerError
from armature.components.contracts.machine import Machine
from armature.components.inference.command import is_deterministic
from armature.components.inference.lease import read_weights_id
from armature.components.inference.probe import random_image, user_message
from armature.components.inference.replica import Replica, pause, reset_caches, resume
from armature.components.inference.settings import ServerSettings
from armature.components.inference.weights.pool import post

log = logging.getLogger(__name__)

_SAMPLED = (8, 5, 7, 4, 6)
"""Numbers of tokens to sample after the test prompts. They differ, so that some prompts are prefilled while others are
decoded."""

_LENGTHS = (300, 7, 180, 31, 90)
"""Lengths in tokens of the test prompts without an image. Some are long enough to fill blocks of the prefix cache and
to make vLLM split attention."""

_SIDES = (28, 28, 28, 28, 64)
"""Side lengths in pixels of the square test images. Most images are tiny, because the rounding of a matrix product
depends on its number of rows only if there are few."""

_AT_ONCE = 3
"""Number of concurrent requests in the test that sends each request together with a few others."""
_ARRIVAL = 0.5
"""Seconds to wait until all requests have reached a paused engine, which then computes all in one step."""

Answer = tuple[float, ...]
"""A server's answer to one test request: the log-probs of the sampled tokens, with float32 precision."""
LoadAgain = Callable[[], Awaitable[bool]]
"""A function that loads a server's weights again, in place, and returns False if that is impossible."""


@dataclass(frozen=True)
class _Request:
    name: str
    route: str
    body: dict[str, Any]

    async def ask(self, http: httpx.AsyncClient, replica: Replica) -> Answer:
        reply = await post(http, replica.endpoint, self.route, self.body | {"model": replica.model})
        try:
            (choice,) = reply.document["choices"]
            logprobs = choice["logprobs"]
            if self.route == "/v1/completions":
                return tuple(map(float, logprobs["token_logprobs"]))
            return tuple(float(token["logprob"]) for token in logprobs["content"])
        except (KeyError, TypeError, ValueError) as error:
            raise ServerError(
                f"no log-probs in its answer: {error!r}", code="server_logprobs_missing", where=replica.url
            ) from error


class Repeatability:
    """Check that the bits of an answer do not depend on other requests at the same time, nor on the server of a pool.

    Attributes:
        promised: True if determinism is configured and no check has failed yet.

    Raises:
        ConfigurationError: as `is_deterministic` does.
    """

    def __init__(self, settings: ServerSettings, machine: Machine, forbidden: Sequence[int]) -> None:
        self.promised = is_deterministic(settings, machine)
        self._required = settings.deterministic is True
        tokens = [token for token in range(12 + len(forbidden)) if token not in forbidden][:12]
        self._requests = _requests(tokens, settings)
        self._first: tuple[int, list[Answer], str] | None = None

    async def check(self, http: httpx.AsyncClient, replica: Replica, load_again: LoadAgain | None = None) -> None:
        """Check that a server is deterministic. It must hold the weights of `replica.version`. Do nothing unless
        determinism is promised.

        The check clears the server's caches and pauses it for a moment. With `load_again`, part of the check is
        repeated after the weights were loaded again. If `inference.deterministic` is unset, a failed check logs a
        warning and sets `promised` to False.

        Raises:
            ServerError: the answers depend on other requests, or differ from another server's.
        """
        if not self.promised:
            return
        try:
            await self._compare(http, replica, load_again)
        except ServerError as error:
            if self._required:
                raise
            log.warning("%s", error)
            self.promised = False
        replica.weights_id = await read_weights_id(http, replica.endpoint)  # the pause has changed the id

    async def _compare(self, http: httpx.AsyncClient, replica: Replica, load_again: LoadAgain | None) -> None:
        await reset_caches(http, replica.endpoint)
        alone = [await request.ask(http, replica) for request in self._requests]
        few = asyncio.Semaphore(_AT_ONCE)

        async def among_few(request: _Request) -> Answer:
            async with few:
                return await request.ask(http, replica)

        self._refuse_others(alone, await asyncio.gather(*map(among_few, self._requests)), "among others", replica)
        self._refuse_others(alone, await self._in_one_step(http, replica), "in one step with all others", replica)
        if load_again is not None and await load_again():
            answers = await self._in_one_step(http, replica)
            self._refuse_others(alone, answers, "after its weights were loaded once more", replica)
        if self._first is None or self._first[0] != replica.version:
            self._first = replica.version, alone, replica.name
        else:
            self._refuse_others(alone, self._first[1], f"from {self._first[2]}", replica)

    async def _in_one_step(self, http: httpx.AsyncClient, replica: Replica) -> list[Answer]:
        """Pause the server, send it all test requests, resume it, and return the answers. The server then computes all
        requests in one step, without cached prefixes."""
        await pause(http, replica.endpoint)
        answers = asyncio.gather(*(request.ask(http, replica) for request in self._requests))
        try:
            await asyncio.sleep(_ARRIVAL)
        finally:
            await resume(http, replica.endpoint)
        return await answers

    def _refuse_others(self, alone: Sequence[Answer], others: Sequence[Answer], company: str, replica: Replica) -> None:
        for request, one, other in zip(self._requests, alone, others, strict=True):
            if one != other:
                place = next((at for at, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]), -1)
                raise ServerError(
                    f"the same seed would not give the same run: after {request.name}, token {place} has the log-prob "
                    f"{one[place]!r} if the request is alone, and {other[place]!r} {company}",
                    code="server_not_deterministic",
                    where=replica.name,
                    remedy="start a joined server on the same kind of processor, in float32, with "
                    "VLLM_CPU_ATTN_SPLIT_KV=0 and our plug-in of this version, or set inference.deterministic = false",
                )


def _requests(allowed: list[int], settings: ServerSettings) -> list[_Request]:
    """Return the test requests: some with text prompts, and some with images if servers accept images. Servers may
    sample only the `allowed` token ids."""
    common = {"temperature": 1.0, "seed": 0, "ignore_eos": True, "allowed_token_ids": allowed}
    made = []
    for start, (length, sampled) in enumerate(zip(_LENGTHS, _SAMPLED, strict=True)):
        length = min(length, settings.max_model_len - sampled)
        prompt = [allowed[(start + place) % len(allowed)] for place in range(length)]
        body = common | {"prompt": prompt, "max_tokens": sampled, "logprobs": 0}
        made.append(_Request(f"{length} tokens", "/v1/completions", body))
    random = np.random.default_rng(0)
    for side, sampled in zip(_SIDES, _SAMPLED, strict=True) if settings.max_images_per_prompt else ():
        messages = user_message(random_image(random, side, side))
        body = common | {"messages": messages, "max_completion_tokens": sampled, "logprobs": True}
        made.append(_Request(f"an image of {side} x {side}", "/v1/chat/completions", body))
    return made
