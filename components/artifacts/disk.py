"""Atomic writes: a file or folder appears whole or not at all, also after a power cut. Errors of a full disk become
StoreError.

Unfinished data lies in a hidden sibling folder of its target, `.<name>-<random>`, which stays locked while its writer
lives. `collect` removes siblings whose writer is gone.
"""

from __future__ import annotations

import errno
import fcntl
import glob
import os
import shutil
import tempfile
import time
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import IO

from armature.components.contracts.errors import ConfigurationError, StoreError

FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""Error numbers of a full disk: no space, quota exceeded, file too large."""
UNLOCKED_SECONDS = 7 * 86400.0
"""Age in seconds after which a hidden sibling without a lock file is removed. A younger one may belong to a writer that
has not made its lock file yet."""
LOCK, CONTENT = "lock", "content"
"""Names of the lock file and of the unfinished data inside a hidden sibling."""


@contextmanager
def raising_disk_full(where: Path) -> Iterator[None]:
    """Convert OSErrors of a full disk, raised in the block, into a StoreError that names the free space.

    Args:
        where: the path being written.

    Raises:
        StoreError: the disk is full, or a file grew past a limit.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in FULL:
            raise
        raise StoreError(
            f"{where.name} could not be written: {os.strerror(error.errno)} ({_free(where)})",
            code="disk_full",
            where=str(where),
            remedy="free space or set another store, then run again: what was finished is kept",
        ) from error


@contextmanager
def raising_store_errors(where: Path) -> Iterator[None]:
    """Convert OSErrors, raised in the block, into errors about the store. The block must access only the store at
    `where`.

    Raises:
        ConfigurationError: the store cannot exist there: a file in place of a folder, no permission, a read-only disk.
        StoreError: the disk is full.
    """
    try:
        with raising_disk_full(where):
            yield
    except (OSError, ValueError, RuntimeError) as error:  # a NUL in the path; a link to itself (Python 3.12: OSError)
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise ConfigurationError(
            f"the folder cannot be used as an artifact store: {reason}",
            code="store_not_usable",
            where=str(getattr(error, "filename", None) or where),
            remedy="choose a folder that can be written: --machine store=FOLDER",
        ) from error


def write_file(path: Path, data: bytes) -> None:
    """Write `data` to `path` atomically and durably. If an OSError is raised, the file at `path` is unchanged."""
    write_files({path: data}, beside=path)


def write_files(files: Mapping[Path, bytes], beside: Path) -> None:
    """Write several files, each atomically, and wait once until all are on the disk. May raise OSError.

    Args:
        files: content by path.
        beside: the unfinished files are written as siblings of this path. Its folder should have few entries, since
            `collect` lists them.
    """
    with locked_sibling(beside) as work:
        written = {work / str(number): path for number, path in enumerate(files)}
        for source, path in written.items():
            source.write_bytes(files[path])
        _sync_all(written)
        for source, path in written.items():
            source.rename(path)
        _sync_all({path.parent for path in files})


@contextmanager
def atomic_folder(home: Path) -> Iterator[Path]:
    """Yield a temporary folder that becomes `home` by one durable rename when the block ends well; the first writer
    wins.

    Raises:
        StoreError: the disk is full or a file grew past a limit. Nothing is left behind.

    Example:
        >>> with tempfile.TemporaryDirectory() as parent:
        ...     with atomic_folder(Path(parent, "result")) as folder:
        ...         _ = (folder / "a.txt").write_text("done")
        ...     os.listdir(parent)
        ['result']
    """
    _remove_left(home)
    with raising_disk_full(home), locked_sibling(home) as work:
        content = work / CONTENT
        content.mkdir()
        yield content
        place_folder(content, home)


def place_folder(content: Path, home: Path) -> None:
    """Rename `content` to `home` durably. If `home` is a non-empty folder already, leave both as they are."""
    sync_tree(content)
    try:
        content.rename(home)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
    sync(home.parent)


@contextmanager
def atomic_replacement(folder: Path) -> Iterator[Path]:
    """Yield an empty folder that replaces `folder` when the block ends well. Until then `folder` is unchanged.

    Raises:
        StoreError: the disk is full or a file grew past a limit.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    _remove_left(folder)
    with raising_disk_full(folder), locked_sibling(folder) as scratch:
        new = scratch / "new"
        new.mkdir()
        yield new
        if folder.exists():
            folder.rename(scratch / "old")
        new.rename(folder)


def link_folder(source: Path, target: Path) -> None:
    """Replace `target` by a folder of hard links to the files of `source`; on another disk, by copies."""
    with atomic_replacement(target) as new:
        shutil.copytree(source, new, copy_function=link_file, dirs_exist_ok=True)


def link_file(source: str | Path, target: str | Path) -> None:
    """Create the file `target` as a hard link to `source`; on another disk, as a copy. `target` must not exist."""
    try:
        os.link(source, target)
    except OSError as error:
        if error.errno not in (errno.EXDEV, errno.EPERM):
            raise
        shutil.copyfile(source, target)


def collect(folder: Path) -> list[Path]:
    """Remove hidden siblings in `folder` whose writers were killed, and return them. Those of living writers stay."""
    removed = []
    for work in folder.glob(".*-*"):
        with suppress(FileNotFoundError):  # another process collects as well
            if work.is_dir() and _remove_abandoned(work):
                removed.append(work)
    return removed


def sync(path: Path) -> None:
    """Wait until a file's content, or a folder's list of names, is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sync_tree(folder: Path) -> None:
    """Wait until every file and folder below `folder` is on the disk."""
    walked = list(os.walk(folder))
    _sync_all([Path(parent, name) for parent, _, names in walked for name in names])
    _sync_all([Path(parent) for parent, *_ in walked])


def _sync_all(paths: Collection[Path]) -> None:
    """Sync many paths at once with threads: a file system writes its journal once for all that wait for it."""
    if len(paths) > 1:
        with ThreadPoolExecutor(min(32, len(paths)), thread_name_prefix="sync") as pool:
            list(pool.map(sync, paths))
    else:
        for path in paths:
            sync(path)


@contextmanager
def locked_sibling(home: Path) -> Iterator[Path]:
    """Yield a hidden, locked folder beside `home`, and delete it when the block ends. If the process is killed,
    `collect` removes it."""
    work, lock = _new_sibling(home)
    with lock:
        try:
            yield work
        finally:
            shutil.rmtree(work, ignore_errors=True)


def _new_sibling(home: Path) -> tuple[Path, IO[str]]:
    """Create a hidden folder beside `home` and lock it. Return the folder and the open lock file."""
    while True:
        work = Path(tempfile.mkdtemp(prefix=f".{home.name}-", dir=home.parent))
        try:
            work.chmod(0o755)
            lock = (work / LOCK).open("w")
        except BaseException:
            work.rmdir()
            raise
        if try_lock(lock) and (work / LOCK).exists():
            return work, lock
        lock.close()  # another process collected it before it was locked
        shutil.rmtree(work, ignore_errors=True)


def try_lock(file: IO[str]) -> bool:
    """Try to lock an open file until it is closed. Return False if another process holds the lock."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _remove_left(home: Path) -> None:
    """Remove the hidden siblings of `home` whose writers were killed. A folder without a lock file is kept, since it
    may belong to another program."""
    for left in home.parent.glob(f".{glob.escape(home.name)}-*"):
        with suppress(FileNotFoundError):  # another process removes it as well
            if (left / LOCK).exists():
                _remove_abandoned(left)


def _remove_abandoned(work: Path) -> bool:
    """Remove a hidden sibling if its writer is gone. Return True if it was removed."""
    with (work / LOCK).open("a") if (work / LOCK).exists() else nullcontext() as lock:
        abandoned = try_lock(lock) if lock else time.time() - work.stat().st_mtime > UNLOCKED_SECONDS
        if abandoned:
            shutil.rmtree(work)
        return abandoned


def _free(where: Path) -> str:
    """Return the free space of the disk that holds `where` as text, such as `120 MiB free`."""
    there = next(path for path in (where.absolute(), *where.absolute().parents) if path.is_dir())
    return f"{shutil.disk_usage(there).free / 2**20:.0f} MiB free"
