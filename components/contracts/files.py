"""Files that others made: a path may lead to a pipe, a device or a folder, and to more bytes than anybody expects."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath, PureWindowsPath

from armature.components.contracts.errors import ArmatureError, DataError

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


# Files that somebody else wrote, read by libraries that somebody else wrote.


@contextmanager
def foreign(what: str, *, where: str, remedy: str = "") -> Iterator[None]:
    """Within, whatever a library raises of a damaged file is a DataError; errors of ours pass as they are."""
    try:
        yield
    except (ArmatureError, MemoryError):
        raise
    except Exception as error:
        detail = " ".join(str(error).split())[:500]
        raise DataError(
            f"{what}: {type(error).__name__}: {detail}", code="foreign_file_unreadable", where=where, remedy=remedy
        ) from error


# File names that come from foreign files: they stay in the folder that they are meant for.


def confined(name: object, where: str) -> PurePosixPath:
    """`name` as a path below a folder, whatever machine wrote it. Symbolic links are not looked at.

    Raises:
        DataError: it is not a name, is absolute, or climbs out of the folder.
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
    """`name` if it is that of a file in the folder itself.

    Raises:
        DataError: it is not one, or has folders in it.
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
