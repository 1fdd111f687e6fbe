"""The artifact store: finished folders under `<stage>/<fingerprint>`, seen whole or not at all.

<root>/<stage>/<fingerprint>/          a finished artifact
<root>/<stage>/<fingerprint>.digest    its digest, so that reuse does not read gigabytes
<root>/workspaces/<stage>-<fingerprint>/   what an unfinished attempt can resume from
<root>/images/                         the image store, shared by all artifacts
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from components.artifacts.digests import folder_digest
from components.artifacts.manifest import read_manifest
from components.artifacts.remote import RemoteStore
from components.contracts.errors import DataError
from components.contracts.stages import Artifact


class ArtifactStore:
    """A local folder, and optionally a remote that finished artifacts are copied to and found in."""

    def __init__(self, root: Path, remote: str | None = None) -> None:
        self.root = root.resolve()
        self.remote = RemoteStore(remote) if remote else None

    @property
    def images(self) -> Path:
        return self.root / "images"

    def home(self, stage: str, fingerprint: str) -> Path:
        return self.root / stage / fingerprint

    def workspace(self, stage: str, fingerprint: str) -> Path:
        folder = self.root / "workspaces" / f"{stage}-{fingerprint}"
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def find(self, stage: str, fingerprint: str) -> Artifact | None:
        """The finished artifact, fetched from the remote if only that has it."""
        home = self.home(stage, fingerprint)
        remote = self.remote
        if not home.is_dir() and remote is not None and remote.has(stage, fingerprint):
            self.write(stage, fingerprint, lambda folder: remote.fetch(stage, fingerprint, folder))
        return self._open(home) if home.is_dir() else None

    def find_digest(self, digest: str) -> Artifact | None:
        """The finished artifact with this digest, or one that begins with these (at least 6) characters."""
        if len(digest) < 6:
            return None
        for sidecar in sorted(self.root.glob("*/*.digest")):
            if sidecar.read_text().startswith(digest):
                return self._open(sidecar.with_suffix(""))
        return None

    def __iter__(self) -> Iterator[Artifact]:
        for sidecar in sorted(self.root.glob("*/*.digest")):
            if sidecar.with_suffix("").is_dir():
                yield self._open(sidecar.with_suffix(""))

    def _open(self, home: Path) -> Artifact:
        sidecar = home.with_name(home.name + ".digest")
        if not sidecar.exists():  # stopped between the rename and this line
            sidecar.write_text(folder_digest(home))
        return Artifact(kind=read_manifest(home).kind, path=home, digest=sidecar.read_text())

    def write(self, stage: str, fingerprint: str, fill: Callable[[Path], None]) -> Artifact:
        """Let `fill` write a new artifact; it appears when complete, and the first writer wins.

        Raises:
            DataError: the disk is full; nothing is left behind.
        """
        home = self.home(stage, fingerprint)
        home.parent.mkdir(parents=True, exist_ok=True)
        with whole_folder(home) as folder:
            fill(folder)
        artifact = self._open(home)
        if self.remote is not None:
            self.remote.push(stage, fingerprint, home)
        return artifact

    @contextmanager
    def lock(self, stage: str, fingerprint: str) -> Iterator[None]:
        """Held by the one attempt that makes this artifact; a second attempt waits, then finds it made."""
        with (self.workspace(stage, fingerprint) / ".lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield


@contextmanager
def whole_folder(home: Path) -> Iterator[Path]:
    """A temporary sibling of `home` that becomes `home` by one rename when the block ends well.

    Raises:
        DataError: the disk is full or a file grew past a limit; the temporary folder is removed.
    """
    work = Path(tempfile.mkdtemp(prefix=f".{home.name}-", dir=home.parent))
    work.chmod(0o755)
    try:
        yield work
        try:
            work.rename(home)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            shutil.rmtree(work)
    except BaseException as error:
        shutil.rmtree(work, ignore_errors=True)
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            free = shutil.disk_usage(home.parent).free
            raise DataError(
                f"the artifact could not be written: {os.strerror(error.errno)} ({free / 2**20:.0f} MiB free)",
                where=str(home),
                remedy="free space or set another store, then run again: what was finished is kept",
            ) from error
        raise


def link_folder(source: Path, target: Path) -> None:
    """Put the files of `source` at `target` by hard links (copies on another disk), replacing what is there."""

    def link(from_: str, to: str) -> None:
        try:
            os.link(from_, to)
        except OSError as error:
            if error.errno not in (errno.EXDEV, errno.EPERM):
                raise
            shutil.copyfile(from_, to)

    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{target.name}-", dir=target.parent) as temporary:
        fresh = Path(temporary) / "fresh"
        shutil.copytree(source, fresh, copy_function=link)
        if target.exists():
            target.rename(Path(temporary) / "old")
        fresh.rename(target)
