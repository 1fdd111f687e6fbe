"""The record of a finished artifact, kept beside it: what each file held, and how it lay on the disk then.

A file that lies as it did is not read again.
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

NAMED = 5
"""Files that an error names."""
SETTLED_NS = 2 * 10**9
"""A file that changed in the same tick of the clock as it was read looks unchanged: such a record is not trusted."""


class FileState(NamedTuple):
    """How a file lies on the disk. The change time and the inode cannot be put back by who edits it."""

    size: int
    mtime_ns: int
    ctime_ns: int
    inode: int

    @classmethod
    def of(cls, path: Path) -> FileState:
        found = path.lstat()
        return cls(found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino)


class Record(BaseModel):
    """`files` maps relpath to md5 and state; `pushed` are the remote stores that have a copy."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    record_version: Literal[1] = 1
    digest: str
    files: dict[str, tuple[str, FileState]]
    pushed: tuple[str, ...] = ()

    @property
    def md5s(self) -> dict[str, str]:
        return {name: md5 for name, (md5, _) in self.files.items()}


def record_path(home: Path) -> Path:
    return home.with_name(home.name + ".digest")


def read_record(home: Path) -> Record | None:
    """Return the record, None if there is none that can be used.

    Raises:
        DataError: a folder is in its place.
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
    """
    Raises:
        StoreError: the disk is full; the artifact is whole without its record.
    """
    with raising_disk_full(record_path(home)):
        write_file(record_path(home), record.model_dump_json().encode())


def scan_files(folder: Path, known: Record | None = None, links: bool = False) -> Record:
    """What the files of `folder` hold; those that lie as `known` says are not read.

    Args:
        links: whether files may be symbolic links, which DVC makes where it is told to.

    Raises:
        DataError: something in it is neither a folder nor a file.
    """
    settled = record_path(folder).stat().st_mtime_ns - SETTLED_NS if known else 0
    files = {}
    for name, path in _listed(folder, links).items():
        md5, before = known.files.get(name, ("", None)) if known else ("", None)
        state = FileState.of(path)
        trusted = state == before and state.ctime_ns < settled
        files[name] = (md5 if trusted else file_digest(path), state)
    return Record(digest=listing_digest({name: md5 for name, (md5, _) in files.items()}), files=files)


def differences(before: Mapping[str, str], now: Mapping[str, str]) -> str:
    """Which files are not as before, in words; both map relpath to md5."""
    said = {
        "changed": sorted(name for name in before.keys() & now.keys() if before[name] != now[name]),
        "added": sorted(now.keys() - before.keys()),
        "removed": sorted(before.keys() - now.keys()),
    }
    return "; ".join(
        f"{what} {', '.join(names[:NAMED])}" + (f" and {len(names) - NAMED} more" if len(names) > NAMED else "")
        for what, names in said.items()
        if names
    )


def _listed(folder: Path, links: bool) -> dict[str, Path]:
    """The files under `folder` by relpath.

    Raises:
        DataError: something in it is neither a folder nor a file.
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
                    "an artifact holds files and folders, and this is neither",
                    code="not_a_file",
                    where=str(path),
                    remedy="remove it, or make the artifact again with --force",
                )
            files[path.relative_to(folder).as_posix()] = path
    return files
