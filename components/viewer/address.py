"""Where the page of a store is, for who makes links to it. The token is not said: a link without it asks for it."""

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
"""In the store; locked as long as the viewer that wrote it lives."""


@contextmanager
def announced(store: Path, address: str) -> Iterator[None]:
    """The page of `store` is at `address` within the block. Of several viewers the first one is said."""
    file = store / RECORD
    try:
        record = file.open("a")
    except OSError:  # a store that can only be read has viewers all the same
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
    """The address of the page of `store`, without its token, if a viewer on this machine serves it."""
    with suppress(OSError, ValueError, KeyError, TypeError), regular(store / RECORD).open() as record:
        try:
            fcntl.flock(record, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            said = json.load(record)
            return str(said["address"]) if said["host"] == socket.gethostname() else None
    return None
