"""ASGI middleware for vLLM that requires the API key on every route and then enforces the lease.

vLLM itself checks its API key only below /v1, /v2, /inference and /cohere. The routes that load weights or run methods
in the workers are not below these, so without this middleware anyone could call them.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from .lease import Lease

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

OPEN_PATHS = frozenset({"/health", "/ping"})


class RequireKey:
    """ASGI middleware that answers 401 to requests without the header `Authorization: Bearer $VLLM_API_KEY`.

    Liveness checks (`OPEN_PATHS`) need no key. Requests with the key go on to `Lease`, then to vLLM. Websockets
    without the key are closed with code 1008.
    """

    def __init__(self, app: Callable[[Message, Receive, Send], Awaitable[None]]) -> None:
        self.app = Lease(app)
        self.expected = f"Bearer {os.environ['VLLM_API_KEY']}".encode()

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or (scope["type"] == "http" and scope["path"] in OPEN_PATHS):
            await self.app(scope, receive, send)
            return
        authorization = dict(scope["headers"]).get(b"authorization", b"")
        if secrets.compare_digest(authorization, self.expected):
            await self.app(scope, receive, send)
        elif scope["type"] == "http":
            await send({"type": "http.response.start", "status": 401, "headers": []})
            await send({"type": "http.response.body", "body": b"a key is needed"})
        else:
            await send({"type": "websocket.close", "code": 1008})
