"""One server as the pool sees it: how to reach it, what it holds, its status."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import httpx

from armature.components.contracts.errors import ArmatureError, WeightSyncError
from armature.components.inference.client import MODEL_NAME
from armature.components.inference.replies import Endpoint, exchange
from armature.components.inference.server import VllmServer
from armature.components.inference.weights.pool import post

UNKNOWN = -1
"""The version of weights that no pool of ours gave."""


@dataclass
class Replica:
    """A server of the pool; `server` is None for one that we joined."""

    name: str
    api_key: str
    url: str = ""
    server: VllmServer | None = None
    ready: bool = False
    """Whether requests may be sent to it."""
    version: int = UNKNOWN
    """Of the weights that it holds."""
    waits: bool = False
    """Whether it is up and gets weights with the next sync: until then only the trainer has those of now."""
    joined: int = 0
    """Times that it came up."""
    model: str = MODEL_NAME
    """What it calls the weights of its version."""
    weights_id: str = ""
    """What its answers bear while it holds them; "": it has no plug-in of ours that could say so."""
    ours_since: str = ""
    """The weights_id since which nobody but this pool has changed its weights."""
    lease: str = ""
    """The id under which this pool has it; "": it is unavailable."""
    outstanding: int = 0
    failures: int = 0
    """Attempts in a row that failed."""
    restarts: int = 0
    """Starts since it last answered a request."""
    given_up: ArmatureError | None = None
    answer_checks: int = 0
    """Times that it was asked to prove its weights between two syncs; see `ServedWeights.check_answer`."""
    passed_check: int = 0
    """The last of them that it passed."""
    checking: asyncio.Lock = field(default_factory=asyncio.Lock)
    suspect: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def endpoint(self) -> Endpoint:
        return Endpoint(self.url, self.api_key, self.lease, self.joined)

    @property
    def says_weights(self) -> bool:
        """Whether its answers bear a weights_id of the weights that they are of."""
        return bool(self.weights_id) or self.server is not None

    def mark_suspect(self) -> None:
        """Send no more requests to it; its monitor sees to it, and gives it the current weights."""
        self.version, self.ready, self.waits = UNKNOWN, False, False
        self.suspect.set()


async def pause(http: httpx.AsyncClient, endpoint: Endpoint) -> None:
    """Have requests in flight stand still, and forget what was computed for them: after `resume` they go on with what
    the server then has, from the tokens that they have sampled. Images that were processed are kept.

    Raises:
        WeightSyncError: it refused.
        httpx.TransportError: it is gone.
    """
    await post(http, endpoint, "/pause?mode=keep&clear_cache=false")
    await post(http, endpoint, "/reset_prefix_cache?reset_running_requests=true")
    await post(http, endpoint, "/reset_encoder_cache")


async def resume(http: httpx.AsyncClient, endpoint: Endpoint) -> None:
    """End `pause`, if it is paused; a server without the route never is. Raises as `pause`."""
    reply = await exchange(http, "POST", f"{endpoint.url}/resume", endpoint.headers)
    if reply.status not in (200, 404, 405):
        raise WeightSyncError(
            f"/resume answered {reply.status}: {reply.text}", code="server_refuses_weights", where=endpoint.url
        )


async def reset_caches(http: httpx.AsyncClient, endpoint: Endpoint) -> None:
    """Forget everything computed with the old weights: prefixes, processed images, encoded images.

    Raises:
        WeightSyncError: the prefix cache is still in use after some seconds.
    """
    for _ in range(20):
        if (await post(http, endpoint, "/reset_prefix_cache")).document.get("success") is True:
            break
        # Blocks of an aborted request are given back by the engine's next step.
        await asyncio.sleep(0.25)
    else:
        raise WeightSyncError(
            "its prefix cache could not be reset", code="cache_not_reset", where=endpoint.url, remedy="read its log"
        )
    await post(http, endpoint, "/reset_mm_cache")
    await post(http, endpoint, "/reset_encoder_cache")
