"""Runs inside a vLLM server: one run at a time has it, and every answer says which weights the server had.

/armature/lease: GET tells who has it; POST {"holder", "who", "seconds"} takes it, or keeps it, for so many seconds
(409 with who has it, if another does); DELETE {"holder"} gives it back. While it is held, requests need the holder's
id in the header `x-armature-lease`; only what is read (GET) is open to others.

Every answer has the header `x-armature-weights`: another value than before means that the server was started again, or
that a request was let in since that may have changed the weights.
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
"""Seconds that a lease lasts at most without being kept."""

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
    """ASGI middleware, inside of the check of the key. It lives in one process: serve with one API process."""

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
                self._changes += 1  # before it happens: what is answered from now on may be of either weights
            await self.app(scope, receive, self._stamping(send))

    @property
    def _held(self) -> bool:
        return time.monotonic() < self._ends

    @property
    def _weights(self) -> str:
        return f"{self._start}-{self._changes}"

    def _may(self, given: str) -> bool:
        """Who names a lease has to have it, so that a holder whose lease ran out learns of it."""
        return given == self._holder if self._held else not given

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
        """What anyone with the key may know: not the holder's id."""
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
    """The JSON object of a small request; empty if it is not one."""
    body, more = b"", True
    while more and len(body) <= _MAX_BODY:
        message = await receive()
        body, more = body + message.get("body", b""), message.get("more_body", False)
    try:
        document = json.loads(body) if len(body) <= _MAX_BODY else None
    except (ValueError, RecursionError):
        return {}
    return document if isinstance(document, dict) else {}
