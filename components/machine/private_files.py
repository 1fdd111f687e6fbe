"""Files that only their owner can read (mode 0600), written atomically."""

from __future__ import annotations

import fcntl
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from armature.components.contracts.errors import DataError

MODE, FOLDER_MODE = 0o600, 0o700
LONGEST_WRITE = 600.0
"""Seconds after which an unfinished temporary file counts as abandoned."""


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise DataError(
            f"cannot be written: {error.strerror}",
            code="file_not_written",
            where=str(path),
            remedy="free space, or see to its folder",
        ) from error


def private_folder(folder: Path) -> Path:
    """Create `folder` if needed, set its mode to 0700 and return it. Raises DataError if this fails."""
    with _writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(FOLDER_MODE)
    return folder


def private_database(path: Path) -> Path:
    """Set the mode of an SQLite database file to 0600 and return its path. A missing file is created empty.

    SQLite gives the files beside a database (-wal, -shm, -journal) the mode of the database. The mode of existing ones
    is changed.

    Raises:
        DataError: the file cannot be written.
    """
    with _writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        os.close(os.open(path, os.O_RDWR | os.O_CREAT, MODE))
        for name in ("", "-wal", "-shm", "-journal"):
            with suppress(FileNotFoundError):
                Path(f"{path}{name}").chmod(MODE)
    return path


@contextmanager
def database_lock(database: Path) -> Iterator[None]:
    """Wait for the lock of an SQLite database, and hold it during the block.

    It is held while tables are created or migrated, which two processes cannot do at the same time. The lock is the
    file beside the database with the suffix .lock, which contains the holder's PID. Who waits prints a line about it.

    Raises:
        DataError: the lock file cannot be written.
    """
    path = database.with_suffix(".lock")
    with _writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("a+")
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            holder, folder = file.read() or "another process", path.parent.absolute()
            print(f"waiting until {holder} has opened the databases in {folder}", file=sys.stderr, flush=True)
            fcntl.flock(file, fcntl.LOCK_EX)
        file.truncate(0)
        print(f"process {os.getpid()}", end="", file=file, flush=True)
        yield


def sqlite_url(path: Path, driver: str) -> str:
    """Return SQLAlchemy's URL of an SQLite database, and create the database with `private_database`.

    The URL names the driver, pysqlite or aiosqlite. For a URL that begins with sqlite:/// MLflow would use the rest
    unparsed as a path, and create a folder of that name.

    Raises:
        DataError: the file cannot be written.
    """
    from sqlalchemy import URL

    database = str(private_database(path).resolve())
    return URL.create(f"sqlite+{driver}", database=database).render_as_string(hide_password=False)


def write_private(path: Path, text: str, *, replace: bool = True) -> None:
    """Write the file atomically, by renaming a temporary file. Raises DataError if this fails.

    Args:
        replace: False keeps an existing file, also one that another process creates at the same time.
    """
    with _writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        for left in path.parent.glob(f".{path.name}-*"):  # of a process that was killed
            with suppress(FileNotFoundError):
                if time.time() - left.stat().st_mtime > LONGEST_WRITE:
                    left.unlink()
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")  # with mode 0600
        try:
            with os.fdopen(handle, "w") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            if replace:
                Path(temporary).replace(path)
            else:
                with suppress(FileExistsError):
                    os.link(temporary, path)
        finally:
            Path(temporary).unlink(missing_ok=True)
