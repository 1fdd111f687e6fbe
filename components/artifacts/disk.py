"""Files that are whole or absent, also after a power cut, and what a disk refuses said in our words.

What is being written is a hidden sibling of what it becomes, locked as long as its writer lives. `collect` removes
those whose writer is gone.
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
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from armature.components.contracts.errors import ConfigurationError, StoreError

FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
UNLOCKED_SECONDS = 7 * 86400.0
"""Age from which a hidden sibling without a lock is removed: a writer that is just beginning has none yet."""
LOCK, CONTENT = "lock", "content"


@contextmanager
def raising_disk_full(where: Path) -> Iterator[None]:
    """
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
    """For a block that touches nothing but the store at `where`.

    Raises:
        ConfigurationError: there cannot be a store: a file in place of a folder, no permission, a read-only disk.
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
            remedy="name one that can be written: --machine store=FOLDER",
        ) from error


def write_file(path: Path, data: bytes) -> None:
    """Put `data` at `path` by one rename that lasts. Raises OSError; what was at `path` is as it was then."""
    write_files({path: data}, beside=path)


def write_files(files: Mapping[Path, bytes], beside: Path) -> None:
    """Put what each path maps to there, each by one rename; all last in the end. Raises OSError.

    Args:
        beside: in whose folder they are written: a small one, for `collect`.
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
    """A temporary folder that becomes `home` by one rename that lasts when the block ends well; the first writer wins.

    Raises:
        StoreError: the disk is full or a file grew past a limit; nothing is left.
    """
    _remove_left(home)
    with raising_disk_full(home), locked_sibling(home) as work:
        content = work / CONTENT
        content.mkdir()
        yield content
        place_folder(content, home)


def place_folder(content: Path, home: Path) -> None:
    """Have `content` at `home` by one rename that lasts, unless something is there."""
    sync_tree(content)
    try:
        content.rename(home)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
    sync(home.parent)


@contextmanager
def atomic_replacement(folder: Path) -> Iterator[Path]:
    """An empty folder that takes the place of `folder` when the block ends well; until then that one is as it was.

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
    """Put the files of `source` at `target` by hard links (copies on another disk), replacing what is there."""

    with atomic_replacement(target) as new:
        shutil.copytree(source, new, copy_function=link_file, dirs_exist_ok=True)


def link_file(source: str | Path, target: str | Path) -> None:
    """Put the file `source` at `target`, where nothing is, by a hard link; on another disk by a copy."""
    try:
        os.link(source, target)
    except OSError as error:
        if error.errno not in (errno.EXDEV, errno.EPERM):
            raise
        shutil.copyfile(source, target)


def collect(folder: Path) -> list[Path]:
    """Remove what killed writers left in `folder`, and return it; what a living one writes stays."""
    removed = []
    for work in folder.glob(".*-*"):
        with suppress(FileNotFoundError):  # another process collects as well
            if work.is_dir() and _remove_abandoned(work):
                removed.append(work)
    return removed


def sync(path: Path) -> None:
    """Wait until the file, or the folder's list of names, is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sync_tree(folder: Path) -> None:
    walked = list(os.walk(folder))
    _sync_all([Path(parent, name) for parent, _, names in walked for name in names])
    _sync_all([Path(parent) for parent, *_ in walked])


def _sync_all(paths: Collection[Path]) -> None:
    """Many at a time: a file system writes its journal once for all that wait for it."""
    if len(paths) > 1:
        with ThreadPoolExecutor(min(32, len(paths)), thread_name_prefix="sync") as pool:
            list(pool.map(sync, paths))
    else:
        for path in paths:
            sync(path)


@contextmanager
def locked_sibling(home: Path) -> Iterator[Path]:
    """A hidden folder beside `home`, gone when the block ends; `collect` removes it if the process was killed."""
    work, lock = _new_sibling(home)
    with lock:
        try:
            yield work
        finally:
            shutil.rmtree(work, ignore_errors=True)


def _new_sibling(home: Path) -> tuple[Path, IO[str]]:
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
        lock.close()  # it was collected in the moment before it was locked
        shutil.rmtree(work, ignore_errors=True)


def try_lock(file: IO[str]) -> bool:
    """Whether nobody else has the file locked; it is ours then until it is closed."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _remove_left(home: Path) -> None:
    """Remove what killed writers of `home` left beside it. Folders without our lock are somebody else's."""
    for left in home.parent.glob(f".{glob.escape(home.name)}-*"):
        with suppress(FileNotFoundError):  # another process removes it as well
            if (left / LOCK).exists():
                _remove_abandoned(left)


def _remove_abandoned(work: Path) -> bool:
    if not (work / LOCK).exists():
        abandoned = time.time() - work.stat().st_mtime > UNLOCKED_SECONDS
        if abandoned:
            shutil.rmtree(work)
        return abandoned
    with (work / LOCK).open("a") as lock:
        abandoned = try_lock(lock)
        if abandoned:
            shutil.rmtree(work)
        return abandoned


def _free(where: Path) -> str:
    there = next(path for path in (where.absolute(), *where.absolute().parents) if path.is_dir())
    return f"{shutil.disk_usage(there).free / 2**20:.0f} MiB free"
