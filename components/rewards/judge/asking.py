"""Send questions to an OpenAI-compatible server with retries, and cache the replies on disk."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import aiohttp

from armature.components.artifacts.cache import DownloadCache
from armature.components.artifacts.disk import collect, write_files
from armature.components.contracts.digests import document_digest
from armature.components.contracts.errors import ConfigurationError, RolloutFailed, blanked, keep_secret
from armature.components.rewards.judge.settings import JudgeSettings

LARGEST_REPLY = 2**22
"""Largest accepted response, in bytes."""
FIRST_WAIT = 0.5
"""Seconds to wait after the first failed attempt. The wait doubles after each further attempt."""
MOST_AT_ONCE = 32
"""Limit on the requests in flight to a judge. The limit is lower for a time after the server has answered 429."""
TOO_MANY = 429
AGAIN = frozenset({408, 409, 425, TOO_MANY})
"""HTTP statuses below 500 after which another attempt may succeed."""


@dataclass(frozen=True, slots=True)
class JudgeReply:
    """The text of a judge's reply. `tokens` is the server's count of the tokens in question and reply together."""

    text: str
    tokens: int


class _RetryableError(Exception):
    """This attempt failed, but another may succeed. `wait` is the number of seconds that the server asks to wait, or
    0."""

    def __init__(self, reason: str, detail: str, wait: float = 0.0) -> None:
        super().__init__(detail)
        self.reason, self.wait = reason, wait


class AdaptiveLimit:
    """A limit on the number of requests in flight, used with `async with` around each request.

    As in TCP, the limit halves after each response with status 429, and grows slowly with each success.
    """

    def __init__(self, most: int) -> None:
        self._most, self._limit, self._in_flight = most, float(most), 0
        self._changed = asyncio.Condition()

    async def __aenter__(self) -> None:
        async with self._changed:
            await self._changed.wait_for(lambda: self._in_flight < int(self._limit))
            self._in_flight += 1

    async def __aexit__(self, *_: object) -> None:
        async with self._changed:
            self._in_flight -= 1
            self._changed.notify_all()

    def narrow(self) -> None:
        """Halve the limit, after a response with status 429."""
        self._limit = max(1.0, self._limit / 2)

    def widen(self) -> None:
        """Raise the limit a little, after a success: n successes at a limit of n raise it by about one."""
        self._limit = min(self._most, self._limit + 1 / self._limit)


class JudgeClient:
    """An HTTP client of one judge. It must be used in the event loop that made it.

    If the server sends the header Retry-After, all requests are delayed.
    """

    def __init__(self, settings: JudgeSettings, base_url: str, key: str) -> None:
        self._settings = settings
        self._url = f"{base_url.rstrip('/')}/chat/completions"
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._proxy = _proxy(self._url)
        self._limit = AdaptiveLimit(MOST_AT_ONCE)
        self._not_before = 0.0
        # aiohttp must not follow redirects, keep cookies or choose proxies: a key would reach another host.
        connector = aiohttp.TCPConnector(limit=MOST_AT_ONCE)
        self._session = aiohttp.ClientSession(
            connector=connector, trust_env=False, cookie_jar=aiohttp.DummyCookieJar(), headers=self._headers
        )

    async def ask(self, body: Mapping[str, Any]) -> JudgeReply:
        """Send a chat request, and retry failed attempts as the settings say.

        Raises:
            RolloutFailed: `judge_timeout`, `judge_unavailable` or `judge_refused`.
        """
        attempt = 1
        while True:
            await asyncio.sleep(max(0.0, self._not_before - time.monotonic()))
            try:
                async with self._limit:
                    return await self._once(body)
            except _RetryableError as failed:
                wait = failed.wait or FIRST_WAIT * 2 ** (attempt - 1) * random.uniform(0.75, 1.25)
                if attempt == self._settings.attempts or failed.wait > self._settings.longest_wait:
                    raise RolloutFailed(failed.reason, f"{failed}; attempt {attempt}") from failed
                if failed.wait:
                    self._not_before = max(self._not_before, time.monotonic() + failed.wait)
            await asyncio.sleep(min(wait, self._settings.longest_wait))
            attempt += 1

    async def close(self) -> None:
        await self._session.close()

    async def _once(self, body: Mapping[str, Any]) -> JudgeReply:
        timeout = aiohttp.ClientTimeout(total=self._settings.timeout)
        try:
            async with self._session.post(
                self._url, json=body, timeout=timeout, allow_redirects=False, proxy=self._proxy
            ) as response:
                content = await _content(response)
                status, wait = response.status, _asked_to_wait(response.headers.get("Retry-After", ""))
        except TimeoutError as error:
            raise _RetryableError("judge_timeout", f"no answer within {self._settings.timeout:g} s") from error
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise _RetryableError("judge_unavailable", f"{type(error).__name__} {error}".strip()) from error
        if status == 200:
            self._limit.widen()
            return _reply(content)
        detail = f"status {status}: {blanked(content.decode(errors='replace'))}"[:500]
        if status == TOO_MANY:
            self._limit.narrow()
        if status in AGAIN or status >= 500:
            raise _RetryableError("judge_unavailable", detail, wait)
        raise RolloutFailed("judge_refused", detail)


async def _content(response: aiohttp.ClientResponse) -> bytes:
    """Read a response. Raises ValueError if it has more than `LARGEST_REPLY` bytes."""
    content = bytearray()
    async for part in response.content.iter_any():
        content += part
        if len(content) > LARGEST_REPLY:
            raise ValueError(f"the response has more than {LARGEST_REPLY} bytes")
    return bytes(content)


def _reply(content: bytes) -> JudgeReply:
    """Parse a response. Raises `_RetryableError` if it is not a chat completion, for example the error
    page of a proxy."""
    try:
        document = json.loads(content)
        text = document["choices"][0]["message"]["content"]
        usage = document.get("usage") or {}
        tokens = usage.get("total_tokens", 0)
    except (ValueError, RecursionError, LookupError, TypeError, AttributeError) as error:
        raise _other_answer(content) from error
    if text is None:  # a reasoning model used up its tokens before the reply
        text = ""
    if not isinstance(text, str) or type(tokens) is not int:
        raise _other_answer(content)
    return JudgeReply(text, tokens)


def _other_answer(content: bytes) -> _RetryableError:
    shown = blanked(content.decode(errors="replace"))[:200]
    return _RetryableError("judge_unavailable", f"the answer is not a chat completion: {shown!r}")


def _asked_to_wait(header: str) -> float:
    """Return the seconds to wait that a Retry-After header asks for, as a number or as a date. Return 0 if it has
    neither."""
    try:
        return max(0.0, float(header)) if header.strip().isdigit() else _until(header)
    except (ValueError, TypeError, OverflowError):
        return 0.0


def _until(date: str) -> float:
    moment = parsedate_to_datetime(date)
    moment = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
    return max(0.0, (moment - datetime.now(UTC)).total_seconds())


def _proxy(url: str) -> str | None:
    """Return the proxy that the environment variables name for `url`. Return None if there is no proxy for it, and for
    loopback addresses."""
    host = urlsplit(url).hostname or ""
    if host == "localhost" or host.startswith("127.") or host == "::1" or proxy_bypass(host):
        return None
    proxy = getproxies().get(urlsplit(url).scheme)
    if proxy is not None:
        keep_secret(proxy)
    return proxy


# --- The cache of replies ---


class ReplyCache:
    """A cache on disk of the replies of one address, which all runs of this machine share.

    Its files can be deleted at any time.

    Raises:
        ConfigurationError: the folder cannot be written.
    """

    def __init__(self, address: str) -> None:
        self._address = address
        self._folder = DownloadCache.standard().folder / "judge"
        try:
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            collect(self._folder)
        except OSError as error:
            raise ConfigurationError(
                f"the cache cannot be written: {error}",
                code="judge_cache_not_writable",
                where=str(self._folder),
                remedy="set ARMATURE_CACHE to a folder",
            ) from error

    def key(self, body: Mapping[str, Any]) -> str:
        """Return the key of a request's reply: the digest of the judge's address and the request `body`."""
        return document_digest({"address": self._address, "body": dict(body)})

    def get(self, key: str) -> str | None:
        """Return the cached reply with this key, or None if it is missing or damaged."""
        try:
            text = json.loads(self._path(key).read_bytes())["reply"]
        except (OSError, ValueError, LookupError, TypeError):
            return None
        return text if isinstance(text, str) else None

    def keep(self, key: str, reply: str) -> None:
        """Write a reply to the cache, atomically. If the disk is full, the reply is not cached and the run
        continues."""
        path = self._path(key)
        with suppress(OSError):
            path.parent.mkdir(exist_ok=True)
            write_files({path: json.dumps({"reply": reply}).encode()}, beside=self._folder / "reply")

    def _path(self, key: str) -> Path:
        return self._folder / key[:2] / f"{key}.json"
