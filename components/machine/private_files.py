"""Files for their owner's eyes alone, mode 0600, that are whole or not there."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from armature.components.contracts.errors import DataError

MODE, FOLDER_MODE = 0o600, 0o700
LONGEST_WRITE = 600.0
"""Seconds after which a file that is still being written is nobody's."""


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
    """`folder` with mode 0700, made if it is not there. Raises DataError if it cannot be."""
    with _writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(FOLDER_MODE)
    return folder


def private_database(path: Path) -> Path:
    """The file of an SQLite database with mode 0600, made empty if it is not there.

    SQLite gives the files beside a database (-wal, -shm, -journal) the mode of the database; older ones are changed.

    Raises:
        DataError: it cannot be written.
    """
    with _writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        os.close(os.open(path, os.O_RDWR | os.O_CREAT, MODE))
        for name in ("", "-wal", "-shm", "-journal"):
            with suppress(FileNotFoundError):
                Path(f"{path}{name}").chmod(MODE)
    return path


def sqlite_url(path: Path, driver: str) -> str:
    """The address of an SQLite database, which is made as `private_database` makes it, for SQLAlchemy.

    It names the driver, pysqlite or aiosqlite: of an address that begins with sqlite:/// MLflow takes the rest for a
    path as it is, and makes the folder of that name.

    Raises:
        DataError: it cannot be written.
    """
    from sqlalchemy import URL

    database = str(private_database(path).resolve())
    return URL.create(f"sqlite+{driver}", database=database).render_as_string(hide_password=False)


def write_private(path: Path, text: str, *, replace: bool = True) -> None:
    """Write the file by one rename. Raises DataError if it cannot be.

    Args:
        replace: False leaves a file that is there as it is, also one that another process makes meanwhile.
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
