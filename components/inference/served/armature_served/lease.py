"""Lease of a vLLM server: one run at a time may use the server, and every response identifies the server's weights.

The middleware adds the route /armature/lease to the server:

- GET returns the lease's state: who holds it and for how long.
- POST {"holder", "who", "seconds"} takes or renews the lease for this number of seconds. If another run holds the
  lease, the response is 409 and says who.
- DELETE {"holder"} releases the lease.

While a run holds the lease, all other requests need the holder's id in the header `x-armature-lease` and get 423
without it. Read requests (GET, HEAD) are always allowed.

Every response to a request that was let through has the header `x-armature-weights`. A changed value means that the
server was restarted, or that since then the server accepted a request that may have changed the weights.
"""

from __future__ import annotations

import json
import re
import secrets
import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

PATH = "/armature/lease"
LONGEST = 600.0
"""Longest time in seconds for which a lease can be taken or renewed."""

_HOLDER = re.compile("[0-9A-Za-z]{16,200}")
_MAX_BODY = 4096
_KEEPS_WEIGHTS = frozenset(
    {
        "/v1/chat/completions",
        "/v1/completions",
        "/tokenize",
        "/detokenize",
        "/reset_prefix_cache",
        "/reset_mm_cache",
        "/reset_encoder_cache",
    }
)


class Lease:
    """ASGI middleware that enforces the lease. It runs behind `RequireKey`, which checks the API key.

    The state is in this process's memory, so vLLM must run with a single API server process.
    """

    def __init__(self, app: Callable[[Message, Receive, Send], Awaitable[None]]) -> None:
        self.app = app
        self._start, self._changes = secrets.token_hex(8), 0
        self._holder = self._who = ""
        self._renewals, self._began, self._ends = 0, 0.0, 0.0

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        reads = scope["type"] == "http" and scope["method"] in ("GET", "HEAD")
        if scope["type"] == "http" and scope["path"] == PATH:
            await self._manage(scope["method"], receive, send)
        elif not reads and not self._may(dict(scope["headers"]).get(b"x-armature-lease", b"").decode("latin-1")):
            await self._refuse(scope, send)
        else:
            if not reads and scope["path"] not in _KEEPS_WEIGHTS:
                self._changes += 1  # counted first: responses from now on may come from old or new weights
            await self.app(scope, receive, self._stamping(send))

    @property
    def _held(self) -> bool:
        return time.monotonic() < self._ends

    @property
    def _weights(self) -> str:
        return f"{self._start}-{self._changes}"

    def _may(self, holder: str) -> bool:
        """Return True if a request with this holder id, "" for none, is allowed.

        A request that names a lease is refused if nobody holds one, so that a run whose lease expired notices.
        """
        return holder == self._holder if self._held else not holder

    def _stamping(self, send: Send) -> Send:
        async def stamped(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = [*message.get("headers", ()), (b"x-armature-weights", self._weights.encode())]
                message = {**message, "headers": headers}
            await send(message)

        return stamped

    async def _manage(self, method: str, receive: Receive, send: Send) -> None:
        if method in ("POST", "DELETE"):
            asked = await _read(receive)
            holder = asked.get("holder")
            if not isinstance(holder, str) or not _HOLDER.fullmatch(holder):
                await self._answer(send, 400)
                return
            mine = self._held and secrets.compare_digest(holder, self._holder)
            if method == "DELETE":
                if mine:
                    self._ends = 0.0
            elif self._held and not mine:
                await self._answer(send, 409)
                return
            elif not self._take(holder, asked, mine):
                await self._answer(send, 400)
                return
        await self._answer(send, 200)

    def _take(self, holder: str, asked: dict[str, Any], mine: bool) -> bool:
        who, seconds = asked.get("who"), asked.get("seconds")
        if not isinstance(who, str) or isinstance(seconds, bool) or not isinstance(seconds, int | float):
            return False
        if not 0 < seconds <= LONGEST:
            return False
        if not mine:
            self._began, self._renewals = time.monotonic(), 0
        self._holder, self._who, self._renewals = holder, who[:500], self._renewals + 1
        self._ends = time.monotonic() + seconds
        return True

    def _state(self) -> dict[str, Any]:
        """Return the lease's state for anyone who has the API key. The holder's id is secret and not included."""
        if not self._held:
            return {"held": False, "weights": self._weights}
        now = time.monotonic()
        return {
            "held": True,
            "who": self._who,
            "since": round(time.time() - (now - self._began)),
            "renewals": self._renewals,
            "expires_in": self._ends - now,
            "weights": self._weights,
        }

    async def _refuse(self, scope: Message, send: Send) -> None:
        if scope["type"] == "http":
            await self._answer(send, 423)
        else:
            await send({"type": "websocket.close", "code": 1008})

    async def _answer(self, send: Send, status: int) -> None:
        headers = [(b"content-type", b"application/json")]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": json.dumps(self._state()).encode()})


async def _read(receive: Receive) -> dict[str, Any]:
    """Return the request's body as a JSON object, or {} if it is not a JSON object or exceeds `_MAX_BODY` bytes."""
    body, more = b"", True
    while more and len(body) <= _MAX_BODY:
        message = await receive()
        body, more = body + message.get("body", b""), message.get("more_body", False)
    try:
        document = json.loads(body) if len(body) <= _MAX_BODY else None
    except (ValueError, RecursionError):
        return {}
    return document if isinstance(document, dict) else {}
