"""The record of a finished artifact: each file's MD5 and its file-system state at the time the MD5 was computed.

The record is stored beside the artifact's folder. A file whose state still equals the recorded one is unchanged and
does not have to be read again.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, ValidationError

from armature.components.artifacts.disk import raising_disk_full, write_file
from armature.components.contracts.digests import file_digest, listing_digest
from armature.components.contracts.errors import DataError

MAX_NAMES = 5
"""Largest number of file names that an error message lists."""
SETTLED_NS = 2 * 10**9
"""Least time in nanoseconds between a file's last change and the writing of a record that trusts the file's state. A
file that changes in the same clock tick in which it is read would look unchanged."""


class FileState(NamedTuple):
    """Size, times and inode of a file. A program can set back size and modification time, but not change time and
    inode."""

    size: int
    mtime_ns: int
    ctime_ns: int
    inode: int

    @classmethod
    def of(cls, path: Path) -> FileState:
        """State of the file at `path`; a symbolic link is not followed."""
        status = path.lstat()
        return cls(status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino)


class Record(BaseModel):
    """Content of a finished artifact.

    Attributes:
        digest: digest of all file names and their MD5 sums.
        files: MD5 and state of each file, by path relative to the artifact's folder.
        pushed: URLs of the remote stores that have a copy.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    record_version: Literal[1] = 1
    digest: str
    files: dict[str, tuple[str, FileState]]
    pushed: tuple[str, ...] = ()

    @property
    def md5s(self) -> dict[str, str]:
        """Return the MD5 of each file, by its path relative to the artifact's folder."""
        return {name: md5 for name, (md5, _) in self.files.items()}

    def trusted_at(self, time_ns: int) -> bool:
        """Return True if a record of this time is trusted for all files, because all had settled."""
        return all(state.ctime_ns < time_ns - SETTLED_NS for _, state in self.files.values())


def record_path(home: Path) -> Path:
    """Path of the record that belongs to the artifact folder `home`: `<home>.digest`."""
    return home.with_name(home.name + ".digest")


def read_record(home: Path) -> Record | None:
    """Read the record of the artifact folder `home`. Return None if it is missing, unreadable or inconsistent.

    Raises:
        DataError: a folder is in the record's place.
    """
    if record_path(home).is_dir():
        raise DataError(
            "a folder is where a file should be", code="not_a_file", where=str(record_path(home)), remedy="remove it"
        )
    try:
        record = Record.model_validate_json(record_path(home).read_bytes())
    except (FileNotFoundError, ValidationError):
        return None
    return record if listing_digest(record.md5s) == record.digest else None


def write_record(home: Path, record: Record) -> None:
    """Write the record beside the artifact folder `home`, atomically.

    Raises:
        StoreError: the disk is full. The artifact remains complete without its record.
    """
    with raising_disk_full(record_path(home)):
        write_file(record_path(home), record.model_dump_json().encode())


def scan_files(folder: Path, previous: Record | None = None, links: bool = False) -> Record:
    """Return the MD5 and the state of every file in `folder`.

    Args:
        previous: an earlier record of the folder. Files whose state has not changed since then are not read.
        links: True if files may be symbolic links, which DVC makes if configured to.

    Raises:
        DataError: the folder contains something other than files and folders.
    """
    settled = record_path(folder).stat().st_mtime_ns - SETTLED_NS if previous else 0
    files = {}
    for name, path in _files_below(folder, links).items():
        md5, before = previous.files.get(name, ("", None)) if previous else ("", None)
        state = FileState.of(path)
        trusted = state == before and state.ctime_ns < settled
        files[name] = (md5 if trusted else file_digest(path), state)
    return Record(digest=listing_digest({name: md5 for name, (md5, _) in files.items()}), files=files)


def differences(before: Mapping[str, str], now: Mapping[str, str]) -> str:
    """Describe which files were changed, added or removed between two listings. A listing has the MD5 of each file by
    relative path."""
    groups = {
        "changed": sorted(name for name in before.keys() & now.keys() if before[name] != now[name]),
        "added": sorted(now.keys() - before.keys()),
        "removed": sorted(before.keys() - now.keys()),
    }
    parts = []
    for change, names in groups.items():
        more = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
        if names:
            parts.append(f"{change} {', '.join(names[:MAX_NAMES])}{more}")
    return "; ".join(parts)


def _files_below(folder: Path, links: bool) -> dict[str, Path]:
    """Return every file below `folder`, by relative path.

    Raises:
        DataError: the folder contains something other than files and folders.
    """
    files = {}
    for parent, folders, names in os.walk(folder):
        for name in [*folders, *names]:
            path = Path(parent, name)
            mode = path.lstat().st_mode
            if stat.S_ISDIR(mode):
                continue
            if not (stat.S_ISREG(mode) or (links and stat.S_ISLNK(mode) and path.is_file())):
                raise DataError(
                    "an artifact may contain only files and folders, and this is neither",
                    code="not_a_file",
                    where=str(path),
                    remedy="remove it, or make the artifact again with --force",
                )
            files[path.relative_to(folder).as_posix()] = path
    return files
