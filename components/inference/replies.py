"""HTTP exchanges with servers that limit a response's size, refuse compression, and parse JSON safely."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import httpx

from armature.components.contracts.errors import ServerError, blanked


@dataclass(frozen=True)
class Endpoint:
    """A server's URL, its API key, and the id of the lease that requests name ("": no lease).

    `joined` counts how often the pool has started or joined the server. If the number has changed, the server may be a
    new process, and an NCCL group that was made with the old process is invalid.

    Example:
        >>> Endpoint("http://127.0.0.1:8000", "sekrit", lease="f00d").headers
        {'Authorization': 'Bearer sekrit', 'X-Armature-Lease': 'f00d'}
    """

    url: str
    api_key: str
    lease: str = ""
    joined: int = 0

    @property
    def headers(self) -> dict[str, str]:
        """HTTP headers of a request, with the API key and the lease id."""
        key = {"Authorization": f"Bearer {self.api_key}"}
        return key | {"X-Armature-Lease": self.lease} if self.lease else key


PLAIN = {"Accept-Encoding": "identity"}
"""Header of every request that forbids compression: vLLM never compresses, and a compressed response could be a
bomb."""

WEIGHTS = "X-Armature-Weights"
"""Response header with the id of the server's weights, set by `armature_served.lease`."""

SMALL = 2**20
"""Size limit in bytes of a response from any route except the chat route. vLLM's responses have less than 20 KB."""


CONNECT = 10.0
"""Seconds to establish a connection."""


class BadReply(ServerError):
    """A server sent an invalid reply."""

    code = "invalid_reply"


@dataclass(frozen=True)
class Reply:
    """A complete response of a server."""

    url: str
    status: int
    content: bytes
    weights: str = ""
    """Id of the server's weights when it responded; "" if the server lacks our plug-in."""

    @property
    def text(self) -> str:
        """First 300 characters of the response for error messages, with secrets blanked out."""
        return blanked(self.content.decode(errors="replace"))[:300]

    @cached_property
    def document(self) -> dict[str, Any]:
        """The response parsed as a JSON object. Raises BadReply if it is something else."""
        try:
            document = json.loads(self.content)
        except (ValueError, RecursionError) as error:
            name = type(error).__name__
            raise BadReply(f"the answer is not JSON ({name}): {self.text!r}", where=self.url) from None
        if not isinstance(document, dict):
            raise BadReply(f"the answer is not a JSON object: {self.text!r}", where=self.url)
        return document


class ReplyReader:
    """Collect the chunks of one response. Raises BadReply if it is compressed or has more than `limit` bytes."""

    def __init__(self, url: str, headers: Mapping[str, str], limit: int) -> None:
        encoding = headers.get("Content-Encoding", "identity")
        if encoding != "identity":
            raise BadReply(f"the answer is compressed ({encoding[:40]!r}), which the request forbids", where=url)
        self._url, self._limit, self._content = url, limit, bytearray()

    def add(self, part: bytes) -> None:
        """Append the chunk `part` to the response."""
        if len(self._content) + len(part) > self._limit:
            raise BadReply(f"the answer has more than {self._limit} bytes, which no valid answer has", where=self._url)
        self._content += part

    def content(self) -> bytes:
        """Return the response so far: all chunks joined."""
        return bytes(self._content)


async def exchange(
    http: httpx.AsyncClient, method: str, url: str, headers: Mapping[str, str], body: Any = None
) -> Reply:
    """Send one request to a route other than the chat route and return the response. Redirects are not followed.

    The client's read timeout applies to the whole exchange.

    Raises:
        BadReply: the response is too long or compressed.
        httpx.TransportError: there is no complete response.
    """
    sent = {**headers, **PLAIN}
    try:
        async with (
            asyncio.timeout(http.timeout.read),
            http.stream(method, url, json=body, headers=sent, follow_redirects=False) as response,
        ):
            collector = ReplyReader(url, response.headers, SMALL)
            parts: AsyncIterator[bytes] = response.aiter_raw()
            async for part in parts:
                collector.add(part)
    except TimeoutError as error:
        raise httpx.ReadTimeout(f"the answer took more than {http.timeout.read:g} s") from error
    return Reply(url, response.status_code, collector.content(), response.headers.get(WEIGHTS, ""))


def exchange_blocking(
    http: httpx.Client,
    method: str,
    url: str,
    headers: Mapping[str, str],
    timeout: float,
    body: Any = None,
    limit: int = SMALL,
) -> Reply:
    """Send one request and return the response, as `exchange` does, but block the calling thread meanwhile.

    The response may take at most `timeout` seconds and may have at most `limit` bytes.
    """
    deadline = time.monotonic() + timeout
    sent = {**headers, **PLAIN}
    each = httpx.Timeout(timeout, connect=min(timeout, CONNECT))
    with http.stream(method, url, json=body, headers=sent, timeout=each, follow_redirects=False) as response:
        collector = ReplyReader(url, response.headers, limit)
        parts: Iterator[bytes] = response.iter_raw()
        for part in parts:
            collector.add(part)
            if time.monotonic() > deadline:
                raise httpx.ReadTimeout(f"the answer took more than {timeout:g} s")
    return Reply(url, response.status_code, collector.content(), response.headers.get(WEIGHTS, ""))
