"""Who listens on a port, and the interface on which ours do."""

from __future__ import annotations

import os
from contextlib import suppress

import psutil


def listener(port: int) -> str:
    """Name and process id of the program that listens on TCP port `port`; empty if none can be seen."""
    with suppress(psutil.Error):
        for connection in psutil.net_connections("tcp"):
            listens = connection.status == psutil.CONN_LISTEN and connection.laddr and connection.laddr.port == port
            if listens and connection.pid is not None:
                process = psutil.Process(connection.pid)
                return f"{process.name()} (process {process.pid}{', this one' * (process.pid == os.getpid())})"
    return ""


def loopback() -> str:
    """The name of the loopback interface, which libraries of collectives want instead of its address."""
    found = psutil.net_if_addrs().items()
    return next((name for name, addresses in found if any(one.address == "127.0.0.1" for one in addresses)), "lo")
