"""One server as the pool sees it: how to reach it, what it holds, how it fares."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

import httpx
import numpy as np

from components.contracts.errors import ArmatureError, WeightSyncError
from components.contracts.rollouts import LogProbs
from components.inference.client import MODEL_NAME
from components.inference.endpoint import Endpoint
from components.inference.server import VllmServer
from components.inference.weights.base import post

_PROBE_LENGTH = 12


@dataclass
class Replica:
    """A server of the pool; `server` is None for one that we joined."""

    name: str
    api_key: str
    url: str = ""
    server: VllmServer | None = None
    ready: bool = False
    """Whether requests may be sent to it."""
    version: int = -1
    """Of the weights that it holds."""
    outstanding: int = 0
    failures: int = 0
    """Attempts in a row that failed."""
    restarts: int = 0
    """Starts since it last answered a request."""
    given_up: ArmatureError | None = None
    suspect: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def endpoint(self) -> Endpoint:
        return Endpoint(self.url, self.api_key)


async def reset_caches(http: httpx.AsyncClient, endpoint: Endpoint) -> None:
    """Forget everything computed with the old weights: prefixes, processed images, encoded images.

    Raises:
        WeightSyncError: the prefix cache is still in use after some seconds.
    """
    for _ in range(20):
        if (await post(http, endpoint, "/reset_prefix_cache")).json()["success"]:
            break
        # Blocks of an aborted request are given back by the engine's next step.
        await asyncio.sleep(0.25)
    else:
        raise WeightSyncError("its prefix cache could not be reset", where=endpoint.url, remedy="read its log")
    await post(http, endpoint, "/reset_mm_cache")
    await post(http, endpoint, "/reset_encoder_cache")


async def probe(http: httpx.AsyncClient, endpoint: Endpoint, forbidden: Sequence[int]) -> LogProbs:
    """Log-probs (L-1,) that the server gives a fixed prompt of L text tokens: a fingerprint of its weights."""
    tokens = [token for token in range(_PROBE_LENGTH + len(forbidden)) if token not in set(forbidden)]
    body = {
        "model": MODEL_NAME,
        "prompt": tokens[:_PROBE_LENGTH],
        "max_tokens": 1,
        "temperature": 1.0,
        "seed": 0,
        "prompt_logprobs": 0,
    }
    entries = (await post(http, endpoint, "/v1/completions", body)).json()["choices"][0]["prompt_logprobs"][1:]
    values = [entry[str(token)]["logprob"] for token, entry in zip(tokens[1:_PROBE_LENGTH], entries, strict=True)]
    return np.asarray(values, dtype=np.float32)
