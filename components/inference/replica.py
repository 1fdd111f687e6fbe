"""One server of a pool: its address, its status and its weights."""

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
"""Version number that stands for weights that this pool did not load."""


@dataclass
class Replica:
    """A server of the pool. `server` is None for a joined server, which another program started."""

    name: str
    api_key: str
    url: str = ""
    server: VllmServer | None = None
    ready: bool = False
    """True if the pool may send requests to the server."""
    version: int = UNKNOWN
    """Version of the weights that the server holds."""
    waits: bool = False
    """True if the server is up but has to wait for the next sync, because only the trainer has the current weights."""
    joined: int = 0
    """Number of times that the pool has started or joined the server."""
    model: str = MODEL_NAME
    """Model name that requests use for the server's current weights."""
    weights_id: str = ""
    """Last known id of the server's weights, which its answers carry too; "" if the server lacks our plug-in."""
    ours_since: str = ""
    """An earlier `weights_id`. Since the server had it, only this pool has changed the server's weights."""
    lease: str = ""
    """Id of this pool's lease on the server; "" if the pool has no lease."""
    outstanding: int = 0
    """Number of requests that the server is answering."""
    failures: int = 0
    """Number of failed attempts since the server last answered a request."""
    restarts: int = 0
    """Number of starts since the server last answered a request."""
    given_up: ArmatureError | None = None
    """The reason why the pool does not use the server any more; None while it does."""
    answer_checks: int = 0
    """Number of times that the server's weights were checked after an answer; see `ServedWeights.check_answer`."""
    passed_check: int = 0
    """Number of the last check of answers that the server passed, counted by `answer_checks`."""
    checking: asyncio.Lock = field(default_factory=asyncio.Lock)
    suspect: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def endpoint(self) -> Endpoint:
        """The server's URL, API key and lease id, which a request needs, and the value of `joined`."""
        return Endpoint(self.url, self.api_key, self.lease, self.joined)

    @property
    def says_weights(self) -> bool:
        """True if the server's answers carry the id of the weights that computed them."""
        return bool(self.weights_id) or self.server is not None

    def mark_suspect(self) -> None:
        """Stop sending requests to the server until its monitor has checked it.

        The monitor restarts the server if needed, and loads the current weights.
        """
        self.version, self.ready, self.waits = UNKNOWN, False, False
        self.suspect.set()


async def pause(http: httpx.AsyncClient, endpoint: Endpoint) -> None:
    """Pause a server's requests in flight and drop their KV cache and encoded images.

    After `resume`, they continue from the tokens sampled so far, recomputed with the weights that the server then has.
    Processed images (pixels) stay cached, because they do not depend on weights.

    Raises:
        WeightSyncError: the server refused.
        httpx.TransportError: the server is gone.
    """
    await post(http, endpoint, "/pause?mode=keep&clear_cache=false")
    await post(http, endpoint, "/reset_prefix_cache?reset_running_requests=true")
    await post(http, endpoint, "/reset_encoder_cache")


async def resume(http: httpx.AsyncClient, endpoint: Endpoint) -> None:
    """Resume a paused server. A server without the route was never paused. Raises as `pause` does."""
    reply = await exchange(http, "POST", f"{endpoint.url}/resume", endpoint.headers)
    if reply.status not in (200, 404, 405):
        raise WeightSyncError(
            f"/resume answered {reply.status}: {reply.text}", code="server_refuses_weights", where=endpoint.url
        )


async def reset_caches(http: httpx.AsyncClient, endpoint: Endpoint) -> None:
    """Clear the server's caches of prefixes, of processed images and of encoded images.

    Raises:
        WeightSyncError: the prefix cache is still in use after 5 seconds.
    """
    for _ in range(20):
        if (await post(http, endpoint, "/reset_prefix_cache")).document.get("success") is True:
            break
        # The engine frees the blocks of an aborted request in its next step.
        await asyncio.sleep(0.25)
    else:
        raise WeightSyncError(
            "the server could not reset its prefix cache",
            code="cache_not_reset",
            where=endpoint.url,
            remedy="read the server's log",
        )
    await post(http, endpoint, "/reset_mm_cache")
    await post(http, endpoint, "/reset_encoder_cache")
