"""Flow runs whose process was killed: Prefect would show them as Running forever.

A flow run holds a lock on a file while its process lives. Unlike a stored PID, a lock cannot be stale.
"""

from __future__ import annotations

import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient
from prefect.exceptions import ObjectNotFound
from prefect.states import Crashed

from armature.components.artifacts.disk import try_lock
from armature.components.contracts.installation import home_folder
from armature.components.machine.private_files import private_folder

FOLDER = home_folder() / ".armature/flow-runs"
"""Folder with one locked file per living flow run. The file's name is the flow run's id, its text the host's name."""


@contextmanager
def alive(flow_run_id: str) -> Iterator[None]:
    """Hold the lock that tells `close_killed_runs` during the block that the flow run's process lives."""
    path = private_folder(FOLDER).resolve() / f"{flow_run_id}.lock"
    unlocked = path.with_suffix(f".{os.getpid()}")  # renamed once it is locked, so nobody takes it for a killed run's
    with unlocked.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.write(socket.gethostname())
        file.flush()
        unlocked.replace(path)
        try:
            yield
        finally:
            path.unlink(missing_ok=True)


def close_killed_runs(client: SyncPrefectClient) -> None:
    """Set the flow runs of this folder to Crashed whose process on this host was killed.

    Runs of other hosts are left alone, because a lock does not reach every host that shares a folder.
    """
    for path in FOLDER.glob("*.lock"):
        # No file: the run has just ended. No such run: it belongs to another Prefect server.
        with suppress(FileNotFoundError, ObjectNotFound), path.open(errors="replace") as file:
            locked = try_lock(file) and os.path.samestat(os.fstat(file.fileno()), path.stat())
            if not locked or file.read() != socket.gethostname():
                continue
            flow_run = client.read_flow_run(UUID(path.stem))
            if flow_run.state is None or not flow_run.state.is_final():
                message = "The process that ran this flow was killed; run it again to resume."
                client.set_flow_run_state(flow_run.id, Crashed(message=message), force=True)
            path.unlink()
