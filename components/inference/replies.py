"""What a server may send back: so many bytes, not compressed, JSON where JSON is promised."""

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

# Where a server is.


@dataclass(frozen=True)
class Endpoint:
    """Where a server listens, the key that it wants, and the id of the lease under which it is asked ("": none).

    `joined` is another number once the server may be another process: connections of before are of no more use.
    """

    url: str
    api_key: str
    lease: str = ""
    joined: int = 0

    @property
    def headers(self) -> dict[str, str]:
        key = {"Authorization": f"Bearer {self.api_key}"}
        return key | {"X-Armature-Lease": self.lease} if self.lease else key


PLAIN = {"Accept-Encoding": "identity"}
"""For every request: vLLM compresses nothing, and what is not compressed cannot be a bomb."""

WEIGHTS = "X-Armature-Weights"
"""Set on every answer by `armature_served.lease`."""

SMALL = 2**20
"""Bytes of the longest answer of any route but the chat route; those seen have less than 20 KB."""


CONNECT = 10.0
"""Seconds for a connection."""


class BadReply(ServerError):
    """A server sent an invalid reply."""

    code = "invalid_reply"


@dataclass(frozen=True)
class Reply:
    """An answer that was read whole."""

    url: str
    status: int
    content: bytes
    weights: str = ""
    """Says which weights the server had, if our plug-in runs in it."""

    @property
    def text(self) -> str:
        """The beginning, to be shown."""
        return blanked(self.content.decode(errors="replace"))[:300]

    @cached_property
    def document(self) -> dict[str, Any]:
        """The JSON object that it is. Raises BadReply."""
        try:
            document = json.loads(self.content)
        except (ValueError, RecursionError) as error:
            name = type(error).__name__
            raise BadReply(f"the answer is not JSON ({name}): {self.text!r}", where=self.url) from None
        if not isinstance(document, dict):
            raise BadReply(f"the answer is not a JSON object: {self.text!r}", where=self.url)
        return document


class ReplyReader:
    """Puts the parts of one answer together. Raises BadReply when it is compressed or has more than `limit` bytes."""

    def __init__(self, url: str, headers: Mapping[str, str], limit: int) -> None:
        encoding = headers.get("Content-Encoding", "identity")
        if encoding != "identity":
            raise BadReply(f"the answer is compressed ({encoding[:40]!r}), which was not asked for", where=url)
        self._url, self._limit, self._content = url, limit, bytearray()

    def add(self, part: bytes) -> None:
        if len(self._content) + len(part) > self._limit:
            raise BadReply(f"the answer has more than {self._limit} bytes, which no valid answer has", where=self._url)
        self._content += part

    def content(self) -> bytes:
        return bytes(self._content)


async def exchange(
    http: httpx.AsyncClient, method: str, url: str, headers: Mapping[str, str], body: Any = None
) -> Reply:
    """One request to a route other than the chat route; all of it has the client's timeout. Follows no redirects.

    Raises:
        BadReply: too long, or compressed.
        httpx.TransportError: no answer, or not all of it.
    """
    given = {**headers, **PLAIN}
    try:
        async with (
            asyncio.timeout(http.timeout.read),
            http.stream(method, url, json=body, headers=given, follow_redirects=False) as response,
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
    """`exchange` for threads; the whole answer has `timeout` seconds and at most `limit` bytes."""
    deadline = time.monotonic() + timeout
    given = {**headers, **PLAIN}
    each = httpx.Timeout(timeout, connect=min(timeout, CONNECT))
    with http.stream(method, url, json=body, headers=given, timeout=each, follow_redirects=False) as response:
        collector = ReplyReader(url, response.headers, limit)
        parts: Iterator[bytes] = response.iter_raw()
        for part in parts:
            collector.add(part)
            if time.monotonic() > deadline:
                raise httpx.ReadTimeout(f"the answer took more than {timeout:g} s")
    return Reply(url, response.status_code, collector.content(), response.headers.get(WEIGHTS, ""))
