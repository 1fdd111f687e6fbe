"""A chat endpoint on loopback whose answers come from outside."""

from __future__ import annotations

import asyncio
import json
import secrets
from dataclasses import dataclass
from typing import Any

MAX_BODY = 256 * 2**20


@dataclass(frozen=True)
class PendingRequest:
    """One request: the chat so far, and where its answer goes."""

    messages: list[dict[str, Any]]
    answer: asyncio.Future[str]


class ChatEndpoint:
    """Speaks as much HTTP as OpenAI clients need for `chat/completions`, with and without streaming."""

    def __init__(self) -> None:
        self._asked: asyncio.Queue[PendingRequest | Exception] = asyncio.Queue()
        self._path = f"/{secrets.token_urlsafe(16)}/v1"
        self._server: asyncio.Server | None = None
        self._open: set[asyncio.Future[str]] = set()

    async def start(self) -> str:
        """The base URL to give to an OpenAI client; it holds a secret, so only that client finds it."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}{self._path}"

    async def next(self) -> PendingRequest:
        """The next request.

        Raises:
            ValueError: it asks for something that a sampler of text cannot give.
        """
        asked = await self._asked.get()
        if isinstance(asked, Exception):
            raise asked
        return asked

    def close(self) -> None:
        """Hang up on whoever still waits for an answer."""
        if self._server is not None:
            self._server.close()
        for answer in list(self._open):
            if not answer.done():
                answer.set_exception(ConnectionAbortedError())

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            status, kind, body = await self._respond(reader)
            head = (
                f"HTTP/1.1 {status}\r\ncontent-type: {kind}\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
            )
            writer.write(head.encode() + body)
            await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass  # the client went away, as it does when its episode is given up
        finally:
            writer.close()

    async def _respond(self, reader: asyncio.StreamReader) -> tuple[str, str, bytes]:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        headers = dict(line.lower().split(": ", 1) for line in head[1:] if ": " in line)
        length = int(headers.get("content-length", "0"))
        if head[0].split(" ")[:2] != ["POST", f"{self._path}/chat/completions"] or not 0 < length <= MAX_BODY:
            return "404 Not Found", "application/json", b'{"error": {"message": "only chat/completions is here"}}'
        request = json.loads(await reader.readexactly(length))
        if request.get("tools"):
            error = "the environment offers tools, which the bridge does not support"
            self._asked.put_nowait(ValueError(error))
            return "400 Bad Request", "application/json", json.dumps({"error": {"message": error}}).encode()
        asked = PendingRequest(request["messages"], asyncio.get_running_loop().create_future())
        self._open.add(asked.answer)
        self._asked.put_nowait(asked)
        try:
            text = await asked.answer
        finally:
            self._open.discard(asked.answer)
        if request.get("stream"):
            chunks = [_completion("chat.completion.chunk", delta={"role": "assistant", "content": text})]
            events = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"
            return "200 OK", "text/event-stream", events.encode()
        answer = _completion("chat.completion", message={"role": "assistant", "content": text})
        return "200 OK", "application/json", json.dumps(answer).encode()


def _completion(kind: str, **content: dict[str, str]) -> dict[str, Any]:
    return {
        "id": "policy",
        "object": kind,
        "created": 0,
        "model": "policy",
        "choices": [{"index": 0, "finish_reason": "stop", **content}],
        "usage": {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0},
    }
