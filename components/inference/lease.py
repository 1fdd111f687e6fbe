"""The right of one run to a server; `armature_served.lease` is the server's side of it."""

from __future__ import annotations

import asyncio
import getpass
import logging
import os
import socket
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx

from armature.components.contracts.errors import ServerError
from armature.components.inference.replies import Endpoint, Reply, exchange

log = logging.getLogger(__name__)

SECONDS = 30.0
"""A lease that is not kept ends after so many seconds: as long does a run that resumes wait for its killed self."""

KEEP_EVERY = 5.0
ASK_EVERY = 1.0
"""Seconds between two tries to have a server that another run has."""
_PATH = "/armature/lease"


async def take(http: httpx.AsyncClient, endpoint: Endpoint, who: str, timeout: float) -> bool:
    """Take or keep the server; False: it has no plug-in of ours, so nobody can.

    A holder that lives shows it every `KEEP_EVERY` seconds. One that does not is waited for, until its lease ends.

    Raises:
        ServerError: a run that lives has had it for more than `timeout` seconds of waiting; or no such answer.
        httpx.TransportError: the server is gone.
    """
    began, seen = time.monotonic(), None
    while True:
        reply = await _send(http, "POST", endpoint, {"who": who, "seconds": SECONDS})
        if reply.status in (200, 404, 405):
            return reply.status == 200
        if reply.status != 409:
            raise ServerError(f"{_PATH} answers {reply.status}: {reply.text}", code="lease_refused", where=endpoint.url)
        held = reply.document
        sign = (held.get("since"), held.get("renewals"))
        if seen is None:
            log.warning("waiting for the server at %s, which another run has: %s", endpoint.url, _holder(held))
        lives, seen = seen is not None and sign[1] != seen[1], sign
        if lives and time.monotonic() - began > timeout:
            raise ServerError(
                f"another run has this server: {_holder(held)}",
                code="server_in_use",
                where=endpoint.url,
                remedy="let it end, take another server, or wait: machine.limits.lease_timeout",
            )
        await asyncio.sleep(ASK_EVERY)


async def keep(http: httpx.AsyncClient, endpoint: Endpoint, who: str) -> None:
    """
    Raises:
        ServerError: another run has the server now.
        httpx.TransportError: the server is gone.
    """
    reply = await _send(http, "POST", endpoint, {"who": who, "seconds": SECONDS})
    if reply.status != 200:
        raise ServerError(f"the lease is lost: {reply.status} {reply.text}", code="lease_lost", where=endpoint.url)


async def give_back(http: httpx.AsyncClient, endpoint: Endpoint) -> None:
    """Let others have it at once. Raises httpx.TransportError or ServerError; it then ends by itself."""
    await _send(http, "DELETE", endpoint, {})


async def read_weights_id(http: httpx.AsyncClient, endpoint: Endpoint) -> str:
    """What the server's answers bear while its weights stay as they are now; "" without our plug-in.

    Raises:
        ServerError: no such answer.
        httpx.TransportError: the server is gone.
    """
    reply = await exchange(http, "GET", f"{endpoint.url}{_PATH}", endpoint.headers)
    if reply.status != 200:
        return ""
    weights_id = reply.document.get("weights")
    if not isinstance(weights_id, str) or not weights_id:
        raise ServerError(
            f"{_PATH} does not say which weights: {reply.text}", code="invalid_weights_mark", where=endpoint.url
        )
    return weights_id


def in_order(*marks: str) -> bool:
    """Whether a server had these marks one after the other, or the same for longer, and was not started in between."""
    starts, changes = zip(*(weights_id.rpartition("-")[::2] for weights_id in marks), strict=True)
    if len(set(starts)) > 1 or not all(change.isdecimal() for change in changes):
        return False
    numbers = [int(change) for change in changes]
    return numbers == sorted(numbers)


def describe_run(folder: Path) -> str:
    """Who we are, for those who find a server taken."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container's user may have no name
        user = f"user {os.getuid()}"
    return f"{user}@{socket.gethostname()}, process {os.getpid()}, {folder.absolute()}"


async def _send(http: httpx.AsyncClient, method: str, endpoint: Endpoint, body: dict[str, Any]) -> Reply:
    url = f"{endpoint.url}{_PATH}"
    return await exchange(http, method, url, endpoint.headers, {"holder": endpoint.lease, **body})


def _holder(held: dict[str, Any]) -> str:
    return f"{str(held.get('who'))[:500]}, since {_time(held.get('since'))}"


def _time(since: Any) -> str:
    try:
        return datetime.fromtimestamp(since, UTC).isoformat(" ", "seconds")
    except (TypeError, ValueError, OSError, OverflowError):
        return "an unknown time"
