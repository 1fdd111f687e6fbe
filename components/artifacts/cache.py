"""The cache of this machine: fetched files, opened tables and digests of large files."""

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
"""Time in seconds that is longer than one clock tick of a local file system. Two changes of a file that are this far
apart get different timestamps."""


@dataclass(frozen=True)
class DownloadCache:
    """Folder and size limit of the cache for fetched files and opened tables.

    The folder can be deleted whenever no process uses it.

    Attributes:
        folder: where everything is stored.
        limit_bytes: largest number of bytes that one dataset may fetch.
        ranges: read remote data by byte ranges in place of fetching whole files.

    Example:
        >>> DownloadCache(Path("/tmp/cache"), limit_bytes=10**9).ranges
        False
    """

    folder: Path
    limit_bytes: int
    ranges: bool = False

    @classmethod
    def standard(cls) -> DownloadCache:
        """Cache configured by the environment: ARMATURE_CACHE is the folder (default ~/.cache/armature),
        ARMATURE_FETCH_LIMIT_GB the limit (default 200), ARMATURE_FETCH either `files` (default) or `ranges`.

        Raises:
            ConfigurationError: the limit is not a number, or ARMATURE_FETCH has another value.
        """
        folder = os.environ.get("ARMATURE_CACHE") or Path.home() / ".cache/armature"
        limit = os.environ.get("ARMATURE_FETCH_LIMIT_GB", "200")
        fetched = os.environ.get("ARMATURE_FETCH", "files")
        if fetched not in ("files", "ranges"):
            raise ConfigurationError(
                f"{fetched!r} is neither 'files' nor 'ranges'",
                code="invalid_fetch_mode",
                where="ARMATURE_FETCH",
                remedy="set it to files or ranges, or unset it",
            )
        try:
            return cls(Path(folder).absolute(), int(float(limit) * 1e9), fetched == "ranges")
        except (ValueError, OverflowError):
            raise ConfigurationError(
                f"{limit!r} is not a number of gigabytes",
                code="invalid_fetch_limit",
                where="ARMATURE_FETCH_LIMIT_GB",
                remedy="set it to a number such as 200, or unset it",
            ) from None


def file_state(path: Path) -> str:
    """Return size, times and inode of a file as text; a symbolic link is followed.

    No program can set back the change time, so an equal state means equal content. If the file changed within the last
    clock tick, wait for the next one: a second change in the same tick would not alter the times.
    """
    state = regular(path).stat()
    age = time.time() - state.st_ctime
    if 0 <= age < TICK_S:
        time.sleep(TICK_S - age)
    return f"{state.st_size}\0{state.st_mtime_ns}\0{state.st_ctime_ns}\0{state.st_ino}"


def file_sha256(path: Path) -> str:
    """SHA-256 of a file's content. The result is cached on disk until the file's size, times or inode change."""
    key = hashlib.sha256(os.fsencode(f"{path.resolve()}\0{file_state(path)}")).hexdigest()

    def write(target: Path) -> None:
        with path.open("rb") as file:
            target.write_text(hashlib.file_digest(file, "sha256").hexdigest())

    return make_once(DownloadCache.standard().folder / "digests" / key, write).read_text()


def make_once(target: Path, write: Callable[[Path], None]) -> Path:
    """Return `target`. If it does not exist yet, call `write` with a temporary path, which becomes `target` by one
    rename.

    Exactly one process writes; others wait for it and use its result.

    Raises:
        ConfigurationError: the folder of `target` cannot be created.
    """
    if target.is_file():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigurationError(
            f"the cache cannot be written: {error}",
            code="cache_not_writable",
            where=str(target.parent),
            remedy="set ARMATURE_CACHE to a folder that can be written",
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
    """Remove temporary folders that killed processes left in `folder`. Each process does this once per folder."""
    collect(folder)
