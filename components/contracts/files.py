"""Safe reading of files that others made: a path may name a pipe, a device or a folder, and a file may be too large."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath, PureWindowsPath

from armature.components.contracts.errors import ArmatureError, DataError

LARGEST_DOCUMENT = 2**26
"""Largest size in bytes of a document, such as a JSON file."""


class UnreadableFile(DataError, OSError):
    """A file that cannot be read. It is also an OSError, for callers that handle unreadable files themselves."""

    code = "unreadable_file"


def is_folder(path: str | Path) -> bool:
    """Check that `path` is a folder. Never raises: a path that is too long or not accessible is not a folder."""
    return os.path.isdir(path)  # noqa: PTH112 (Path.is_dir raises for those)


def regular(path: Path) -> Path:
    """Return `path` if it is a regular file or a link to one, so that opening it cannot block.

    Opening a pipe blocks until someone writes to it, and a device may never end.

    Raises:
        FileNotFoundError: there is no such file.
        UnreadableFile: it is a folder, a pipe, a socket or a device, or reading is not permitted.
    """
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        raise
    except OSError as error:
        raise _unreadable(error.strerror or str(error), path) from error
    if not stat.S_ISREG(mode):
        raise _unreadable("not a regular file", path)
    if not os.access(path, os.R_OK):
        raise _unreadable("the file may not be read", path)
    return path


def read_bytes(path: Path, limit: int = LARGEST_DOCUMENT, remedy: str = "give a smaller one") -> bytes:
    """Return the content of a regular file that has at most `limit` bytes.

    Raises:
        OSError: the file cannot be read.
        DataError: the file has more than `limit` bytes; `remedy` is the last part of the message.
    """
    with regular(path).open("rb") as file:
        content = file.read(limit + 1)
    if len(content) > limit:
        raise DataError(f"the file has more than {limit} bytes", code="file_too_large", where=str(path), remedy=remedy)
    return content


def _unreadable(what: str, path: Path) -> UnreadableFile:
    """Return the error for the file `path`; `what` is the reason, which is also the error's `strerror`."""
    error = UnreadableFile(what, where=str(path), remedy="put the file itself there, and let its reader read it")
    error.strerror = what
    return error


# --- Errors of libraries that read damaged files ---


@contextmanager
def foreign(what: str, *, where: str, remedy: str = "") -> Iterator[None]:
    """Turn any error that a library raises in this block, such as for a damaged file, into a DataError.

    `what` is the first part of the message. An ArmatureError and a MemoryError are raised unchanged.
    """
    try:
        yield
    except (ArmatureError, MemoryError):
        raise
    except Exception as error:
        detail = " ".join(str(error).split())[:500]
        raise DataError(
            f"{what}: {type(error).__name__}: {detail}", code="foreign_file_unreadable", where=where, remedy=remedy
        ) from error


# --- File names in files that others wrote must not lead out of their folder ---


def confined(name: object, where: str) -> PurePosixPath:
    """Return `name` as a relative path that stays in its folder, also if it was written on Windows.

    Symbolic links are not checked.

    >>> confined("data\\\\episode.parquet", where="info.json")
    PurePosixPath('data/episode.parquet')

    Raises:
        DataError: it is not a name, is absolute, or leads out of the folder.
    """
    text = name if isinstance(name, str) else ""
    path = PurePosixPath(text.replace("\\", "/"))
    windows = PureWindowsPath(text)
    if not path.name or "\0" in text or ".." in path.parts or path.is_absolute() or windows.drive or windows.root:
        raise DataError(
            f"the file name {name!r:.200} does not stay in its folder",
            code="unsafe_file_name",
            where=where,
            remedy="use the original file; names in it are relative and have no '..'",
        )
    return path


def bare_name(name: object, where: str) -> str:
    """Return `name` if it is the name of a file directly in the folder.

    Raises:
        DataError: it is not a file name, or it contains folders.
    """
    path = confined(name, where)
    if len(path.parts) != 1:
        raise DataError(
            f"the file name {name!r:.200} has folders in it",
            code="unsafe_file_name",
            where=where,
            remedy="use the original file",
        )
    return path.name
