"""Answers whose bits depend on their request and the weights alone, not on what else a server computes.

What a request shares a batch with depends on when requests arrive, and so on the load of the machine. On CPU one
operation of vLLM's looks at it: with more than one thread, attention splits the keys of a decoded token into parts
where there are too few requests to keep all threads busy, and adds up the parts (`VLLM_CPU_ATTN_SPLIT_KV`). The
products of oneDNN, the norms and the sampler give a row the same bits alone and among others.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import httpx

from components.contracts.errors import ServerError
from components.contracts.machine import Machine
from components.inference.command import is_deterministic
from components.inference.replica import Replica
from components.inference.settings import ServerSettings
from components.inference.weights.base import post

log = logging.getLogger(__name__)

_LENGTHS = (300, 7, 180, 31, 90, 260, 55, 140)
"""Tokens of the probe's prompts: long enough for attention to be split, and all different."""

_SAMPLED = 8

Answer = tuple[float, ...]
"""Log-probs, in float32, of the tokens that were sampled."""


class Repeatability:
    """That the same request has the same bits alone, among others, and on every server of a pool.

    Attributes:
        promised: whether it is so, as far as it was asked.

    Raises:
        ConfigurationError: as `is_deterministic` does.
    """

    def __init__(self, settings: ServerSettings, machine: Machine, forbidden: Sequence[int]) -> None:
        self.promised = is_deterministic(settings, machine)
        self._required = settings.deterministic is True
        tokens = [token for token in range(12 + len(forbidden)) if token not in forbidden][:12]
        longest = settings.max_model_len - _SAMPLED
        self._tokens = tokens
        self._prompts = [
            [tokens[(start + place) % len(tokens)] for place in range(min(length, longest))]
            for start, length in enumerate(_LENGTHS)
        ]
        self._first: tuple[int, Answer, str] | None = None

    async def check(self, http: httpx.AsyncClient, replica: Replica) -> None:
        """Ask a server that holds the weights of its version; nothing is asked where nothing is promised.

        Where `inference.deterministic` is left out, a processor whose products depend on the batch costs no more than
        the promise: a warning says so.

        Raises:
            ServerError: it answers otherwise among other prompts, or otherwise than another server.
        """
        if not self.promised:
            return
        try:
            await self._compare(http, replica)
        except ServerError as error:
            if self._required:
                raise
            log.warning("%s", error)
            self.promised = False

    async def _compare(self, http: httpx.AsyncClient, replica: Replica) -> None:
        (alone,) = await _answers(http, replica, self._prompts[:1], self._tokens)
        among = (await _answers(http, replica, self._prompts, self._tokens))[0]
        if among != alone:
            raise _refusal(f"{alone} alone and {among} among others", replica.name)
        if self._first is None or self._first[0] != replica.version:
            self._first = replica.version, alone, replica.name
        elif alone != self._first[1]:
            raise _refusal(f"{alone}, and {self._first[1]} of {self._first[2]}", replica.name)


def _refusal(answers: str, name: str) -> ServerError:
    return ServerError(
        f"the same seed would not give the same run: the log-probs of a prompt are {answers}",
        where=name,
        remedy="a joined server: start it on this kind of processor, in float32 and with VLLM_CPU_ATTN_SPLIT_KV=0; "
        "else set inference.deterministic = false",
    )


async def _answers(
    http: httpx.AsyncClient, replica: Replica, prompts: list[list[int]], allowed: list[int]
) -> list[Answer]:
    """The log-probs of what is sampled after each prompt."""
    body = {
        "model": replica.model,
        "prompt": prompts,
        "max_tokens": _SAMPLED,
        "temperature": 1.0,
        "seed": 0,
        "logprobs": 0,
        "ignore_eos": True,
        "allowed_token_ids": allowed,
    }
    try:
        choices = (await post(http, replica.endpoint, "/v1/completions", body)).document["choices"]
        in_order = sorted(choices, key=lambda choice: int(choice["index"]))
        answers = [tuple(map(float, choice["logprobs"]["token_logprobs"])) for choice in in_order]
    except (KeyError, TypeError, ValueError) as error:
        raise ServerError(f"no log-probs in its answer: {error!r}", where=replica.url) from error
    if len(answers) != len(prompts):
        raise ServerError(f"{len(answers)} answers to {len(prompts)} prompts", where=replica.url)
    return answers
