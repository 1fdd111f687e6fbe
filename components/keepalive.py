"""When a connection counts as broken whose other end says nothing: its network may be gone, and nobody is told."""

from __future__ import annotations

import socket

SILENCE = 60.0
"""Seconds without an answer of the other end's kernel, however long the work takes that was asked for."""
PROBES = 3


def socket_options(silence: float = SILENCE) -> list[tuple[int, int, int]]:
    """Options of a TCP socket that break its connection `silence` seconds, 4 or more, after the last answer.

    The kernel sends keepalive probes (RFC 9293, section 3.8.4) while nothing else is sent, and gives up what is sent
    and not acknowledged (RFC 5482). What a system does not have is left out.
    """
    pause = max(1, round(silence / (PROBES + 1)))
    wanted = {
        "TCP_KEEPIDLE": pause,
        "TCP_KEEPINTVL": pause,
        "TCP_KEEPCNT": PROBES,
        "TCP_USER_TIMEOUT": round(1000 * silence),
    }
    known = [(getattr(socket, name), value) for name, value in wanted.items() if hasattr(socket, name)]
    return [(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1), *((socket.IPPROTO_TCP, *each) for each in known)]
