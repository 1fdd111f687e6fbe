"""Publish and read the address of the viewer that serves a store, so that other programs can link to its page.

The address does not contain the viewer's token. A page opened without the token asks for it.
"""

from __future__ import annotations

import fcntl
import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from armature.components.artifacts.disk import try_lock
from armature.components.contracts.files import regular

RECORD = "view.json"
"""Name of the file in the store that has the viewer's address. The viewer holds a lock on it as long as it runs."""


@contextmanager
def announced(store: Path, address: str) -> Iterator[None]:
    """Publish `address`, the address of the viewer's page of `store`, while the block runs. If several viewers serve
    the store, the address of the first one is published."""
    file = store / RECORD
    try:
        record = file.open("a")
    except OSError:  # the store is read-only, so the address is not published
        yield
        return
    with record:
        if not try_lock(record):
            yield
            return
        record.truncate(0)
        record.write(json.dumps({"address": address, "host": socket.gethostname()}))
        record.flush()
        try:
            yield
        finally:
            file.unlink(missing_ok=True)


def viewer_address(store: Path) -> str | None:
    """Return the address of the viewer's page of `store`, without the token. Return None if no viewer on this machine
    serves the store."""
    with suppress(OSError, ValueError, KeyError, TypeError), regular(store / RECORD).open() as record:
        try:
            fcntl.flock(record, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            document = json.load(record)
            return str(document["address"]) if document["host"] == socket.gethostname() else None
    return None
