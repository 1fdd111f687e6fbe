"""Find listening sockets that other machines could connect to."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from ipaddress import ip_address

import psutil


def beyond_loopback(processes: Iterable[psutil.Process]) -> list[str]:
    """Return the address and the command of each listening TCP socket of `processes` that other machines could connect
    to."""
    result = []
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            for socket in process.net_connections("tcp"):
                listens = socket.status == psutil.CONN_LISTEN and socket.laddr
                if listens and not ip_address(socket.laddr.ip).is_loopback:
                    result.append(f"{socket.laddr.ip}:{socket.laddr.port} {' '.join(process.cmdline())[-80:]}")
    return result
