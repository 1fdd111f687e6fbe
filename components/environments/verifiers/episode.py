"""An episode around a loop that requests messages from a chat endpoint."""

from __future__ import annotations

import asyncio
import json
import secrets
from base64 import b64decode
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

from armature.components.artifacts.videos import read_video
from armature.components.contracts.episodes import Observation, Outcome
from armature.components.contracts.errors import DataError
from armature.components.contracts.images import EncodedImage

# --- The common part of verifiers' two interfaces: rows and a way to play them ---


@dataclass(frozen=True)
class Row:
    """A task of the environment: `value` in the form that verifiers uses, and `identity`, a digest of its content."""

    value: Any
    identity: str
    system_prompt: str | None


class VerifiersSource(Protocol):
    """A loaded environment of the package verifiers, through either of its interfaces (legacy or v1)."""

    max_turns: int

    def rows(self) -> tuple[Sequence[Row], Sequence[Row] | None]:
        """Return the training rows and the rows for evaluation, or None if the environment has no separate ones."""

    async def play(self, row: Row, base_url: str) -> dict[str, float]:
        """Play a row with the chat endpoint at `base_url` and return `reward`, its parts and the metrics by name."""


# --- A chat endpoint on loopback whose answers come from our policy ---

MAX_BODY = 256 * 2**20
"""Largest number of bytes in a request."""


@dataclass(frozen=True)
class PendingRequest:
    """A request that waits for its answer: the chat so far, and the future that receives the answer."""

    messages: list[dict[str, Any]]
    answer: asyncio.Future[str]


class ChatEndpoint:
    """A server with the part of HTTP that OpenAI clients need for `chat/completions`, with and without streaming."""

    def __init__(self) -> None:
        self._requests: asyncio.Queue[PendingRequest | Exception] = asyncio.Queue()
        self._path = f"/{secrets.token_urlsafe(16)}/v1"
        self._server: asyncio.Server | None = None
        self._open: set[asyncio.Future[str]] = set()

    async def start(self) -> str:
        """Start the server and return its base URL. The URL contains a secret, so only our client can use it."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}{self._path}"

    async def next(self) -> PendingRequest:
        """Wait for the next request and return it.

        Raises:
            ValueError: the request offers tools, which are not supported.
        """
        request = await self._requests.get()
        if isinstance(request, Exception):
            raise request
        return request

    def close(self) -> None:
        """Stop the server and close all connections that still wait for an answer."""
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
            pass  # the client disconnected, as it does when its episode is cancelled
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
            self._requests.put_nowait(ValueError(error))
            return "400 Bad Request", "application/json", json.dumps({"error": {"message": error}}).encode()
        pending = PendingRequest(request["messages"], asyncio.get_running_loop().create_future())
        self._open.add(pending.answer)
        self._requests.put_nowait(pending)
        try:
            text = await pending.answer
        finally:
            self._open.discard(pending.answer)
        if request.get("stream"):
            chunk = _completion("chat.completion.chunk", delta={"role": "assistant", "content": text})
            return "200 OK", "text/event-stream", f"data: {json.dumps(chunk)}\n\ndata: [DONE]\n\n".encode()
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


Play = Callable[[str], Awaitable[Mapping[str, float]]]


class VerifiersEpisode:
    """An episode around `play(base_url)`, which runs the environment's loop and returns its reward parts."""

    def __init__(self, play: Play, system_prompt: str | None) -> None:
        self._play, self._system_prompt = play, system_prompt
        self._endpoint = ChatEndpoint()
        self._loop: asyncio.Future[Mapping[str, float]] | None = None
        self._request: PendingRequest | None = None
        self._seen: list[dict[str, Any]] = []

    async def reset(self) -> Observation:
        self._loop = asyncio.ensure_future(self._play(await self._endpoint.start()))
        observation = (await self._advance()).observation
        if observation is None:
            raise ValueError("the environment ended the episode before its first request")
        return observation

    async def step(self, action: str) -> Outcome:
        assert self._request is not None
        self._seen = [*self._request.messages, {"role": "assistant", "content": action}]
        self._request.answer.set_result(action)
        return await self._advance()

    async def close(self) -> None:
        self._endpoint.close()
        if self._loop is not None and not self._loop.done():
            self._loop.cancel()
            with suppress(asyncio.CancelledError):
                await self._loop

    async def _advance(self) -> Outcome:
        """Wait until the environment's loop sends another request or ends, and return the outcome."""
        assert self._loop is not None
        request = asyncio.ensure_future(self._endpoint.next())
        try:
            either: list[asyncio.Future[Any]] = [request, self._loop]
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if not request.done():
                return Outcome(None, await self._loop)
            self._request = request.result()
        finally:
            request.cancel()
        return Outcome(Observation(self._unseen(self._request.messages)))

    def _unseen(self, messages: list[dict[str, Any]]) -> tuple[str | EncodedImage, ...]:
        """Return the content of the messages that are new since the last turn.

        Raises:
            ValueError: the environment changed earlier messages, or new messages are not from the user.
        """
        if not self._seen:
            system = [message for message in messages[:1] if message["role"] == "system"]
            if [content(message) for message in system] != ([(self._system_prompt,)] if self._system_prompt else []):
                raise ValueError("the system prompt is not the same for all tasks, which the bridge does not support")
            self._seen = system
        old, new = messages[: len(self._seen)], messages[len(self._seen) :]
        if [_essence(message) for message in old] != [_essence(message) for message in self._seen]:
            raise ValueError("the environment rewrote earlier messages, which the bridge does not support")
        roles = {message["role"] for message in new}
        if roles != {"user"}:
            raise ValueError(
                f"the environment sent messages as {sorted(roles - {'user'})}; the bridge supports user messages"
            )
        return tuple(part for message in new for part in content(message))


def content(message: Mapping[str, Any]) -> tuple[str | EncodedImage, ...]:
    """Return the text, images and videos of a message in order.

    Raises:
        ValueError: an image or video is damaged or not inline (nothing is downloaded), or a part is of another type.
    """
    if message["content"] is None or isinstance(message["content"], str):
        return (message["content"] or "",)
    return tuple(_part(part) for part in message["content"])


def _part(part: Mapping[str, Any]) -> str | EncodedImage:
    if part["type"] == "text":
        return str(part["text"])
    if part["type"] not in ("image_url", "video_url"):
        raise ValueError(f"a message holds {part['type']!r}; the bridge supports text, images and videos")
    url = str(part[part["type"]]["url"])
    try:
        return EncodedImage.from_url(url) if part["type"] == "image_url" else read_video(_inline(url))
    except DataError as error:
        raise ValueError(str(error)) from error


def _inline(url: str) -> bytes:
    """Return the bytes of a video in a data URL; other URLs raise a ValueError."""
    head, _, data = url.partition(";base64,")
    if not head.startswith("data:video/"):
        raise ValueError(f"a video is passed by URL, {url[:80]!r}: give its bytes as data:video/...;base64,...")
    return b64decode(data, validate=True)


def _essence(message: Mapping[str, Any]) -> tuple[str, tuple[str | EncodedImage, ...]]:
    return message["role"], content(message)
