"""The client of leases: a lease gives one run the exclusive use of a server. `armature_served.lease` is the server's
side."""

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
"""Seconds after which a lease expires unless it is renewed. A run that resumes waits this long for its killed
process."""

KEEP_EVERY = 5.0
"""Seconds between two renewals of a lease."""
ASK_EVERY = 1.0
"""Seconds between two attempts to take the lease of a server that another run holds."""
_PATH = "/armature/lease"


async def take(http: httpx.AsyncClient, endpoint: Endpoint, who: str, timeout: float) -> bool:
    """Take or renew the lease of a server. Return False if the server has no leases, because our plug-in is missing.

    If another run holds the lease, wait until it is released or expires. A live run renews its lease every `KEEP_EVERY`
    seconds; a dead run does not.

    Raises:
        ServerError: another live run still holds the lease after `timeout` seconds, or the answer is invalid.
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
            log.warning("waiting for the server at %s, which another run uses: %s", endpoint.url, _holder(held))
        lives, seen = seen is not None and sign[1] != seen[1], sign
        if lives and time.monotonic() - began > timeout:
            raise ServerError(
                f"another run uses this server: {_holder(held)}",
                code="server_in_use",
                where=endpoint.url,
                remedy="end that run, use another server, or wait longer (machine.limits.lease_timeout)",
            )
        await asyncio.sleep(ASK_EVERY)


async def keep(http: httpx.AsyncClient, endpoint: Endpoint, who: str) -> None:
    """Renew this run's lease of a server.

    Raises:
        ServerError: another run has taken the lease.
        httpx.TransportError: the server is gone.
    """
    reply = await _send(http, "POST", endpoint, {"who": who, "seconds": SECONDS})
    if reply.status != 200:
        raise ServerError(f"the lease is lost: {reply.status} {reply.text}", code="lease_lost", where=endpoint.url)


async def give_back(http: httpx.AsyncClient, endpoint: Endpoint) -> None:
    """Release this run's lease of a server. If this raises httpx.TransportError or ServerError, the lease expires by
    itself."""
    await _send(http, "DELETE", endpoint, {})


async def read_weights_id(http: httpx.AsyncClient, endpoint: Endpoint) -> str:
    """Return the current id of the server's weights; "" if the server lacks our plug-in.

    Every answer carries this id. It changes when the server's weights may have changed.

    Raises:
        ServerError: the answer is invalid.
        httpx.TransportError: the server is gone.
    """
    reply = await exchange(http, "GET", f"{endpoint.url}{_PATH}", endpoint.headers)
    if reply.status != 200:
        return ""
    weights_id = reply.document.get("weights")
    if not isinstance(weights_id, str) or not weights_id:
        raise ServerError(
            f"{_PATH} gives no id of the weights: {reply.text}", code="invalid_weights_mark", where=endpoint.url
        )
    return weights_id


def in_order(*weights_ids: str) -> bool:
    """Return True if one server can have had these ids of weights in this order, without a restart in between.

    An id has the form START-CHANGES. START is a random number for each start of the server, and CHANGES counts the
    requests that may have changed its weights.

    Example:
        >>> in_order("a1-3", "a1-3", "a1-5"), in_order("a1-5", "a1-3"), in_order("a1-3", "b2-4")
        (True, False, False)
    """
    starts, changes = zip(*(each.rpartition("-")[::2] for each in weights_ids), strict=True)
    if len(set(starts)) > 1 or not all(change.isdecimal() for change in changes):
        return False
    numbers = [int(change) for change in changes]
    return numbers == sorted(numbers)


def describe_run(folder: Path) -> str:
    """Return a text with this run's user, host, process and folder. Other runs that wait for its server show it."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # the user of a container may have no name
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
