"""The HTTP server of a gateway: `chat/completions` on loopback, with a key of its own."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections import Counter
from dataclasses import dataclass
from hmac import compare_digest
from typing import get_args

from aiohttp import web

from armature.components.contracts.episodes import ChatAnswer, ChatRequest
from armature.components.environments.gateway.messages import (
    MODEL,
    RefusalCode,
    Refused,
    SampledCalls,
    chunks,
    read_request,
    response,
)

MAX_BODY = 256 * 2**20
"""Largest number of bytes in a request."""


@dataclass(frozen=True)
class PendingRequest:
    """A request that waits for its answer, and the future that receives it."""

    request: ChatRequest
    answer: asyncio.Future[ChatAnswer]


class ChatGateway:
    """A server with the part of OpenAI's API that agents need: `models` and `chat/completions`, streamed or not.

    A client has to send `key`, as a bearer token or in the header X-API-Key. `refused` counts requests that are not
    answered, by code.

    Args:
        most: number of requests that are answered; None: no limit.
    """

    def __init__(self, most: int | None = None) -> None:
        self.key = secrets.token_urlsafe(32)
        self.refused: Counter[str] = Counter()
        self._most, self._answered = most, 0
        self._calls = SampledCalls()
        self._requests: asyncio.Queue[PendingRequest] = asyncio.Queue()
        self._runner: web.AppRunner | None = None
        self._open: set[asyncio.Future[ChatAnswer]] = set()
        self._waited, self._since = 0.0, 0.0

    @property
    def waited(self) -> float:
        """Seconds in which at least one request waited for its answer."""
        return self._waited + (time.monotonic() - self._since if self._open else 0.0)

    async def start(self) -> str:
        """Start the server and return its base URL."""
        app = web.Application(client_max_size=MAX_BODY)
        app.router.add_post("/v1/chat/completions", self._serve)
        app.router.add_get("/v1/models", self._serve)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        return f"http://127.0.0.1:{self._runner.addresses[0][1]}/v1"

    async def next(self) -> PendingRequest:
        """Wait for the next request and return it."""
        return await self._requests.get()

    async def close(self) -> None:
        """Stop the server and refuse all requests that still wait for an answer."""
        for answer in list(self._open):
            if not answer.done():
                answer.set_result(ChatAnswer("", refusal="the episode is over"))
        if self._runner is not None:
            await self._runner.cleanup()

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        try:
            sent = request.headers.get("X-API-Key") or request.headers.get("Authorization", "").removeprefix("Bearer ")
            if not compare_digest(sent.encode(errors="replace"), self.key.encode()):
                raise Refused("wrong_key", "the API key is not the key of this rollout", 401)
            if request.method == "GET":
                return web.json_response({"object": "list", "data": [{"id": MODEL, "object": "model"}]})
            return await self._complete(request)
        except web.HTTPRequestEntityTooLarge:
            refused = Refused("too_large", f"the request has more than {MAX_BODY} bytes", 413)
        except Refused as error:
            refused = error
        self.refused[refused.code] += 1
        error_body = {"message": str(refused), "type": "invalid_request_error", "code": refused.code}
        return web.json_response({"error": error_body}, status=refused.status)

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        try:
            body = json.loads(await request.read())
        except (ValueError, RecursionError) as error:
            raise Refused("malformed_request", f"the body is not JSON: {error}") from error
        read = await asyncio.to_thread(read_request, body, self._calls)
        if self._answered == self._most:
            raise Refused("no_completions_left", f"the limit of {self._most} completions is reached")
        self._answered += 1
        answer = await self._answer(read)
        if answer.refusal:
            raise Refused("not_answered", answer.refusal)
        calls = self._calls.sent(answer) if answer.calls else []
        if not body.get("stream"):
            return web.json_response(response(answer, calls))
        streamed = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        await streamed.prepare(request)
        usage = bool((body.get("stream_options") or {}).get("include_usage"))
        lines = [json.dumps(chunk) for chunk in chunks(answer, calls, usage)]
        await streamed.write("".join(f"data: {line}\n\n" for line in [*lines, "[DONE]"]).encode())
        return streamed

    async def _answer(self, read: ChatRequest) -> ChatAnswer:
        pending = PendingRequest(read, asyncio.get_running_loop().create_future())
        if not self._open:
            self._since = time.monotonic()
        self._open.add(pending.answer)
        self._requests.put_nowait(pending)
        try:
            return await pending.answer
        finally:
            self._open.discard(pending.answer)
            if not self._open:
                self._waited += time.monotonic() - self._since


def refusal_parts(refused: Counter[str]) -> dict[str, float]:
    """Return counts of refused requests as parts of a reward, such as `refused_unsupported`."""
    return {f"refused_{code}": float(refused[code]) for code in get_args(RefusalCode) if refused[code]}


REFUSAL_WEIGHTS = {f"refused_{code}": 0.0 for code in get_args(RefusalCode)}
"""Weights of the parts that `refusal_parts` returns."""
