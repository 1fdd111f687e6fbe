"""Which sockets of ours a stranger could reach."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from ipaddress import ip_address

import psutil


def beyond_loopback(processes: Iterable[psutil.Process]) -> list[str]:
    """Listening TCP sockets of `processes` that other machines could connect to, with their command."""
    result = []
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            for socket in process.net_connections("tcp"):
                listens = socket.status == psutil.CONN_LISTEN and socket.laddr
                if listens and not ip_address(socket.laddr.ip).is_loopback:
                    result.append(f"{socket.laddr.ip}:{socket.laddr.port} {' '.join(process.cmdline())[-80:]}")
    return result
