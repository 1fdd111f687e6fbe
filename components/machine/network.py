"""Ports, broken connections, and numbers at an address for Prometheus."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

import psutil

from armature.components.contracts.errors import ConfigurationError

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

# Programs that listen on a port, and the network interfaces on which ours do.


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


def network(interface: str) -> str:
    """Return the name of this machine's interface that has the name or the address `interface`.

    Raises:
        ConfigurationError: this machine has no such interface.
    """
    families = (socket.AF_INET, socket.AF_INET6)
    addresses = {
        name: [one.address for one in found if one.family in families] for name, found in psutil.net_if_addrs().items()
    }
    for name, each in addresses.items():
        if each and interface in (name, *each):
            return name
    there = ", ".join(f"{name} ({each[0]})" for name, each in sorted(addresses.items()) if each)
    raise ConfigurationError(
        f"{socket.gethostname()} has no network interface {interface!r} with an address",
        code="unknown_network_interface",
        where="machine.trainer.interface",
        remedy=f"name the one that connects the nodes, or its address; {socket.gethostname()} has {there}",
    )


# When a connection counts as broken whose other end says nothing: its network may be gone, and nobody is told.

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


# Numbers at an address, as Prometheus reads them.


@contextmanager
def metrics_server(address: str, registry: CollectorRegistry, where: str) -> Iterator[str]:
    """Answer GET /metrics at `address` ("host:port", port 0 for a free one) within the block; gives the URL.

    Args:
        where: The setting that has the address.

    Raises:
        ConfigurationError: nothing can listen there.
    """
    from prometheus_client import start_http_server

    host, _, port = address.rpartition(":")
    try:
        server, thread = start_http_server(int(port), host.strip("[]"), registry)
    except (OSError, OverflowError, ValueError) as error:
        raise ConfigurationError(
            f"metrics cannot be served: {error}",
            where=where,
            remedy="give an address of this machine and a free port; port 0 takes any",
        ) from error
    try:
        yield f"http://{host}:{server.server_port}/metrics"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
