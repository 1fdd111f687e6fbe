"""Whether nodes reach each other, over the network that they train over.

Every node keeps a connection to the first one, on which nothing is ever sent: the kernel's keepalive probes (RFC 9293,
section 3.8.4) tell either end when the other one is gone, however long a collective takes, and whatever the processes
do.
"""

from __future__ import annotations

import socket
from contextlib import suppress
from typing import Self

import psutil

from armature.components.contracts.errors import ConfigurationError
from armature.components.keepalive import socket_options
from armature.components.ports import loopback

Address = tuple[str, int]

_CONNECT = 10.0
_MOST = 1024
"""Connections that are taken: whoever else is on the network may open some."""


def network(given: str) -> tuple[str, str]:
    """Name and address of the interface of this node that has the name or the address `given`.

    Raises:
        ConfigurationError: it has none.
    """
    for name, addresses in _addresses().items():
        if given in (name, *addresses):
            return name, addresses[0] if given == name else given
    raise ConfigurationError(
        f"this node has no network interface {given!r} with an address",
        code="unknown_network_interface",
        where="machine.trainer_interface",
        remedy=f"name that of the network between the nodes, or its address; this node has {_known()}",
    )


def connect(first: Address, silence: float) -> socket.socket:
    """A connection to the first node, which breaks `silence` seconds after its last answer. Raises OSError."""
    link = socket.create_connection(first, timeout=_CONNECT)
    return _watched(link, silence)


def unreachable(first: Address, reason: str) -> str:
    """What to tell the user of a node that `connect` failed on."""
    return (
        f"the first node does not answer at {first[0]}, port {first[1]}: {reason}\n"
        f"  where: this node, which has {_known()}\n"
        "  what to do: look for a cable or a firewall between the nodes, which have to reach each other on every TCP "
        "port; if that is the wrong network, name another machine.trainer_interface. Still trying"
    )


def broken(link: socket.socket) -> str | None:
    """Why the other end is gone; None while it is there."""
    try:
        return None if link.recv(1) else "it ended"
    except BlockingIOError:
        return None
    except ConnectionResetError:
        return "it ended"
    except OSError as error:
        return f"no answer ({error.strerror})"


class NodeLinks:
    """The connections of other nodes to this one, the first.

    Args:
        interface: see `network`; None: loopback.
        silence: seconds without an answer after which a node is gone.

    Raises:
        ConfigurationError: this node has no such interface.
    """

    def __init__(self, interface: str | None, silence: float) -> None:
        self.interface, own = network(interface or loopback())
        self._silence = silence
        self._listener = socket.create_server((own, 0), family=socket.AF_INET6 if ":" in own else socket.AF_INET)
        self._listener.setblocking(False)
        self._links: dict[Address, socket.socket] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for link in (self._listener, *self._links.values()):
            link.close()

    @property
    def address(self) -> Address:
        """What `connect` needs."""
        host, port = self._listener.getsockname()[:2]
        return host, port

    def broken(self, other: Address) -> str | None:
        """Why the node that connected from `other` is gone; None while it is there."""
        self._accept()
        if other not in self._links:
            return None
        reason = broken(self._links[other])
        if reason is None or _up(self.interface):
            return reason
        return f"{reason}; the first node's own interface {self.interface} is down"

    def _accept(self) -> None:
        with suppress(OSError):  # there is no other, or it is gone already
            while len(self._links) < _MOST:
                link, other = self._listener.accept()
                self._links[other[:2]] = _watched(link, self._silence)


def _watched(link: socket.socket, silence: float) -> socket.socket:
    for option in socket_options(silence):
        link.setsockopt(*option)
    link.setblocking(False)
    return link


def _addresses() -> dict[str, list[str]]:
    """Of each interface that has one, IPv4 first."""
    families = (socket.AF_INET, socket.AF_INET6)
    return {
        name: [one.address for family in families for one in addresses if one.family == family]
        for name, addresses in psutil.net_if_addrs().items()
        if any(one.family in families for one in addresses)
    }


def _known() -> str:
    return ", ".join(
        f"{name} ({addresses[0]}{'' if _up(name) else ', down'})" for name, addresses in sorted(_addresses().items())
    )


def _up(interface: str) -> bool:
    state = psutil.net_if_stats().get(interface)
    return state is not None and state.isup
