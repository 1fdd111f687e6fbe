"""A TCP proxy on loopback whose connections can be cut."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress
from urllib.parse import urlsplit


class Proxy:
    """A proxy at the address `self.url` that forwards all connections to the server at `url`."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._target = (parts.hostname or "127.0.0.1", int(parts.port or 80))
        self._open: set[socket.socket] = set()
        self._cut = False
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        """End all connections now, and each new connection immediately, until `restore` is called."""
        self._cut = True
        for connection in list(self._open):
            _end(connection)

    def restore(self) -> None:
        self._cut = False

    def close(self) -> None:
        self.cut()
        self._listener.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with client, suppress(OSError):
            if not self._cut:
                with socket.create_connection(self._target) as server:
                    self._open |= {client, server}
                    threading.Thread(target=_pump, args=(server, client), daemon=True).start()
                    _pump(client, server)
                    self._open -= {client, server}


def _pump(source: socket.socket, target: socket.socket) -> None:
    with suppress(OSError):
        while data := source.recv(65536):
            target.sendall(data)
    _end(source)
    _end(target)


def _end(connection: socket.socket) -> None:
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
