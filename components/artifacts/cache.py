"""Where fetched files and opened columns are kept on this machine."""

from __future__ import annotations

import fcntl
import hashlib
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from armature.components.artifacts.disk import CONTENT, collect, locked_sibling
from armature.components.contracts.errors import ConfigurationError
from armature.components.contracts.files import regular

TICK_S = 0.02
"""Longer than a tick of a local file system's clock."""


@dataclass(frozen=True)
class DownloadCache:
    """Where fetched files and opened tables are kept, and how much one dataset may fetch; nothing but ranges of files
    with `ranges`.

    All of it can be deleted at any time that nothing uses it.
    """

    folder: Path
    limit_bytes: int
    ranges: bool = False

    @classmethod
    def standard(cls) -> DownloadCache:
        """`ARMATURE_CACHE` or ~/.cache/armature, 200 GB or `ARMATURE_FETCH_LIMIT_GB`, files or `ARMATURE_FETCH`.

        Raises:
            ConfigurationError: the limit is not a number, or what is fetched is something else.
        """
        folder = os.environ.get("ARMATURE_CACHE") or Path.home() / ".cache/armature"
        limit = os.environ.get("ARMATURE_FETCH_LIMIT_GB", "200")
        fetched = os.environ.get("ARMATURE_FETCH", "files")
        if fetched not in ("files", "ranges"):
            raise ConfigurationError(
                "neither files nor ranges",
                code="invalid_fetch_mode",
                where="ARMATURE_FETCH",
                remedy="set it to one, or not",
            )
        try:
            return cls(Path(folder).absolute(), int(float(limit) * 1e9), fetched == "ranges")
        except (ValueError, OverflowError):
            raise ConfigurationError(
                "not a number of gigabytes",
                code="invalid_fetch_limit",
                where="ARMATURE_FETCH_LIMIT_GB",
                remedy="set it to one, or not",
            ) from None


def file_state(path: Path) -> str:
    """Size, times and inode of a file (a link's target). The change time cannot be put back by who edits the file.

    A file that changed just now is waited for: another change within the same tick of the file system's clock would
    leave all of them as they are.
    """
    state = regular(path).stat()
    age = time.time() - state.st_ctime
    if 0 <= age < TICK_S:
        time.sleep(TICK_S - age)
    return f"{state.st_size}\0{state.st_mtime_ns}\0{state.st_ctime_ns}\0{state.st_ino}"


def file_sha256(path: Path) -> str:
    """SHA-256 of a file's content, kept in the standard cache for as long as its size, times and inode stay."""
    key = hashlib.sha256(os.fsencode(f"{path.resolve()}\0{file_state(path)}")).hexdigest()

    def write(target: Path) -> None:
        with path.open("rb") as file:
            target.write_text(hashlib.file_digest(file, "sha256").hexdigest())

    return make_once(DownloadCache.standard().folder / "digests" / key, write).read_text()


def make_once(target: Path, write: Callable[[Path], None]) -> Path:
    """`target`, which `write` fills under another name; one process does, others wait and find it made."""
    if target.is_file():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigurationError(
            f"the cache cannot be written: {error}",
            code="cache_not_writable",
            where=str(target.parent),
            remedy="set ARMATURE_CACHE to a folder",
        ) from error
    with (target.parent / f".{target.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.is_file():
            _collect(target.parent)
            with locked_sibling(target.with_name("new")) as work:
                made = work / CONTENT
                made.touch(mode=0o600)
                write(made)
                made.rename(target)
    return target


@cache
def _collect(folder: Path) -> None:
    """Remove what killed processes left, once for each folder."""
    collect(folder)
