"""Programs that listen on a port, and the network interfaces on which ours do."""

from __future__ import annotations

import os
import socket
from contextlib import suppress

import psutil

from armature.components.contracts.errors import ConfigurationError


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
        where="machine.trainer_interface",
        remedy=f"name the one that connects the nodes, or its address; {socket.gethostname()} has {there}",
    )
