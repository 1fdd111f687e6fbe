"""Network helpers: used ports, interfaces, detection of broken connections, and a server of Prometheus metrics."""

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

# --- Listening programs and network interfaces ---


def listening_process(port: int) -> psutil.Process | None:
    """Return the process that listens on TCP port `port`, or None if no such process is visible."""
    with suppress(psutil.Error):
        for connection in psutil.net_connections("tcp"):
            listens = connection.status == psutil.CONN_LISTEN and connection.laddr and connection.laddr.port == port
            if listens and connection.pid is not None:
                return psutil.Process(connection.pid)
    return None


def listener(port: int) -> str:
    """Return name and PID of the program that listens on TCP port `port`; "" if no such program is visible."""
    with suppress(psutil.Error):
        if (process := listening_process(port)) is not None:
            return f"{process.name()} (process {process.pid}{', this one' * (process.pid == os.getpid())})"
    return ""


def loopback() -> str:
    """Return the name of the loopback interface. Collective libraries need the name, not the address."""
    interfaces = psutil.net_if_addrs().items()
    return next((name for name, addresses in interfaces if any(one.address == "127.0.0.1" for one in addresses)), "lo")


def network(interface: str) -> str:
    """Find the network interface of this machine whose name or address is `interface`, and return its name.

    Raises:
        ConfigurationError: this machine has no such interface.
    """
    families = (socket.AF_INET, socket.AF_INET6)
    addresses = {
        name: [one.address for one in assigned if one.family in families]
        for name, assigned in psutil.net_if_addrs().items()
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


# --- Detection of broken connections: when a network fails, neither end receives an error ---

SILENCE = 60.0
"""Seconds without an answer from the other machine's kernel, after which a connection counts as broken.

The kernel answers even while its program computes, so a long request does not break the connection.
"""
PROBES = 3


def socket_options(silence: float = SILENCE) -> list[tuple[int, int, int]]:
    """Return TCP socket options that close a connection `silence` seconds (at least 4) after the last answer.

    The kernel sends keepalive probes on an idle connection (RFC 9293, section 3.8.4), and gives up if sent data is not
    acknowledged (RFC 5482). Options that the operating system does not have are omitted.
    """
    pause = max(1, round(silence / (PROBES + 1)))
    wanted = {
        "TCP_KEEPIDLE": pause,
        "TCP_KEEPINTVL": pause,
        "TCP_KEEPCNT": PROBES,
        "TCP_USER_TIMEOUT": round(1000 * silence),
    }
    options = [(getattr(socket, name), value) for name, value in wanted.items() if hasattr(socket, name)]
    return [(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1), *((socket.IPPROTO_TCP, *each) for each in options)]


# --- Metrics for Prometheus ---


@contextmanager
def metrics_server(address: str, registry: CollectorRegistry, where: str) -> Iterator[str]:
    """Serve GET /metrics at `address` ("host:port"; port 0 takes a free port) within the block; yields the URL.

    Args:
        where: the setting that holds the address, for errors.

    Raises:
        ConfigurationError: the address is not available.
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
