"""Serve the page of a store until it is interrupted."""

from __future__ import annotations

import secrets
import signal
import socket
from collections.abc import Callable
from pathlib import Path

import uvicorn

from armature.components.contracts.errors import ConfigurationError
from armature.components.contracts.files import is_folder
from armature.components.ports import listener
from armature.components.view.address import announced
from armature.components.view.app import ViewServer, view_app


def serve(store: Path, port: int, ready: Callable[[str], None]) -> None:
    """Listen on loopback, on `port` or, if it is 0, on a free one.

    Args:
        ready: is told the address, with its token, when the page can be opened.

    Raises:
        ConfigurationError: there is no such store, or something listens on the port already.
    """
    if not is_folder(store):
        raise ConfigurationError(
            "there is no artifact store to look at",
            code="store_missing",
            where=str(store),
            remedy="run a recipe here first, or name the store's folder: --store",
        )
    with socket.socket() as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind(("127.0.0.1", port))
        except OSError as error:
            raise ConfigurationError(
                f"port {port} is in use",
                code="viewer_port_in_use",
                where=listener(port),
                remedy="choose another: --port",
            ) from error
        listening.listen()
        token = secrets.token_urlsafe(24)
        app = view_app(ViewServer(store), token)
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=2))
        address = f"http://127.0.0.1:{listening.getsockname()[1]}/"
        if signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:  # nohup ignores it
            signal.signal(signal.SIGHUP, lambda *_: signal.raise_signal(signal.SIGINT))
        with announced(store, address):
            ready(f"{address}?token={token}")
            server.run(sockets=[listening])
