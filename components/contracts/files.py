"""Files that others made: a path may lead to a pipe, a device or a folder, and to more bytes than anybody expects."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from armature.components.contracts.errors import DataError

LARGEST_DOCUMENT = 2**26
"""Bytes of a document that people or programs write, such as JSON."""


class UnreadableFile(DataError, OSError):
    """It is also an OSError, for code that has its own words for a file that cannot be read."""

    code = "unreadable_file"


def is_folder(path: str | Path) -> bool:
    """Check for a folder. No path is an error: one that is too long, or may not be looked at, is not a folder."""
    return os.path.isdir(path)  # noqa: PTH112 (Path.is_dir raises for those)


def regular(path: Path) -> Path:
    """The path of a regular file, or of a link to one, which can be opened without waiting for anybody.

    To open a pipe waits until someone writes into it, and a device may never end.

    Raises:
        FileNotFoundError: there is no such file.
        UnreadableFile: it is a folder, a pipe, a socket or a device, or may not be read.
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
    """Return the content of a regular file of at most `limit` bytes.

    Raises:
        OSError: it cannot be read.
        DataError: it has more.
    """
    with regular(path).open("rb") as file:
        content = file.read(limit + 1)
    if len(content) > limit:
        raise DataError(f"the file has more than {limit} bytes", code="file_too_large", where=str(path), remedy=remedy)
    return content


def _unreadable(what: str, path: Path) -> UnreadableFile:
    error = UnreadableFile(what, where=str(path), remedy="put the file itself there, and let its reader read it")
    error.strerror = what
    return error
