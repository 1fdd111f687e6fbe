"""The artifact store: finished folders under `<stage>/<fingerprint>`, seen whole or not at all.

<root>/<stage>/<fingerprint>/          a finished artifact
<root>/<stage>/<fingerprint>.digest    its record: an artifact that lies as recorded is not read again
<root>/workspaces/<stage>-<fingerprint>/   what an unfinished attempt can resume from
<root>/replaced/                       what was made again by --force
<root>/images/                         the image store, shared by all artifacts
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import IO

from tqdm import tqdm

from components.artifacts.disk import collect, replaced_folder, try_lock, usable, whole_folder
from components.artifacts.manifest import MANIFEST, verified
from components.artifacts.record import FileState, Record, read_record, record_path, write_record
from components.artifacts.remote import RemoteStore
from components.contracts.errors import DataError
from components.contracts.stages import Artifact

NO_ARTIFACTS = frozenset({"images", "replaced", "workspaces"})


class ArtifactStore:
    """A local folder, and optionally a remote that finished artifacts are copied to and found in.

    Args:
        say: is told what is waited for.
    """

    def __init__(self, root: Path, remote: str | None = None, say: Callable[[str], None] = tqdm.write) -> None:
        with usable(root):
            self.root = root.resolve()
        self._say = say
        self.remote = RemoteStore(remote, say) if remote else None

    @property
    def images(self) -> Path:
        return self.root / "images"

    def home(self, stage: str, fingerprint: str) -> Path:
        return self.root / stage / fingerprint

    def workspace(self, stage: str, fingerprint: str) -> Path:
        """
        Raises:
            ConfigurationError: see `usable`, as for every method.
        """
        folder = self.root / "workspaces" / f"{stage}-{fingerprint}"
        with usable(self.root):
            folder.mkdir(parents=True, exist_ok=True)
        return folder

    def find(self, stage: str, fingerprint: str) -> Artifact | None:
        """The finished artifact, fetched from the remote if only that has it, sent there if only that has it not.

        Raises:
            DataError: it is not what was made, here or in the remote.
            StoreError: the remote does not answer.
        """
        home = self.home(stage, fingerprint)
        with usable(self.root):
            here = os.path.lexists(home)
        if here:
            return self._open(home)
        if self.remote is None or not self.remote.has(stage, fingerprint):
            return None
        self._fetch(self.remote, home)
        return self._open(home)

    def find_digest(self, digest: str) -> Artifact | None:
        """The finished artifact with this digest, or one that begins with these (at least 6) characters.

        Raises:
            DataError: it is not what was made.
        """
        if len(digest) < 6:
            return None
        found = next((each for each in self if each.digest.startswith(digest)), None)
        return self._open(found.path) if found else None

    def __iter__(self) -> Iterator[Artifact]:
        """Every finished artifact as it is recorded; its files are not looked at."""
        for path in sorted(self.root.glob("*/*.digest")):
            home = path.with_suffix("")
            if home.is_dir() and (record := read_record(home)):
                yield Artifact(kind=home.parent.name, path=home, digest=record.digest)

    def verify(self) -> Iterator[tuple[Path, DataError | None]]:
        """Read every file of every artifact; gives each artifact's folder, and what is wrong with it."""
        for home in sorted(self.root.glob("*/*")):
            if not home.is_dir() or home.name.startswith(".") or home.parent.name in NO_ARTIFACTS:
                continue
            try:
                verified(home, home.parent.name, read_record(home), everything=True)
                yield home, None
            except DataError as error:
                yield home, error

    def write(self, stage: str, fingerprint: str, fill: Callable[[Path], None]) -> Artifact:
        """Let `fill` write a new artifact; it appears when complete, and the first writer wins.

        Raises:
            StoreError: the disk is full, and nothing is left behind; or the remote does not answer, and it is kept.
        """
        home = self.home(stage, fingerprint)
        with usable(self.root):
            home.parent.mkdir(parents=True, exist_ok=True)
        with whole_folder(home) as folder:
            fill(folder)
            record = verified(folder, stage)
        self._keep(home, record)
        return self._open(home)

    @contextmanager
    def lock(self, stage: str, fingerprint: str) -> Iterator[None]:
        """Held by the one attempt that makes this artifact; a second attempt says whom it waits for, and waits.

        What killed attempts left half-written in the store is removed.
        """
        workspace = self.workspace(stage, fingerprint)
        with usable(self.root):
            file = (workspace / ".lock").open("a+")
        with file:
            if not try_lock(file):
                self._say(f"{stage}: waits for {_holder(file)}, which makes the same artifact ({fingerprint})")
                fcntl.flock(file, fcntl.LOCK_EX)
            with usable(self.root):
                self._collect(fingerprint)
                _sign(file)
            yield

    def set_aside(self, stage: str, fingerprint: str) -> None:
        """Move what an attempt has made, finished or not, below `replaced/`, and delete the remote copies.

        The caller holds the lock. The artifact itself goes last: until then, it is the one that is found.
        """
        aside = self.root / "replaced" / f"{stage}-{fingerprint}-{datetime.now(UTC):%Y%m%dT%H%M%S.%f}"
        workspace = self.workspace(stage, fingerprint)
        parts = [path for path in workspace.iterdir() if path.name != ".lock"]
        units = [path for path in self.root.glob(f"*/{fingerprint}-*") if path.parent.name not in NO_ARTIFACTS]
        home = self.home(stage, fingerprint)
        with usable(self.root):
            for path in [*parts, *units, record_path(home), home]:
                if os.path.lexists(path):
                    target = aside / path.relative_to(self.root)
                    target.parent.mkdir(parents=True, exist_ok=True)
                    path.rename(target)
        if self.remote is not None:
            self.remote.remove(fingerprint)
        if aside.exists():
            self._say(f"{stage}: made again; what was made before is in {aside}")

    def _collect(self, fingerprint: str) -> None:
        stages = [path for path in self.root.iterdir() if path.is_dir() and path.name not in NO_ARTIFACTS]
        for folder in (*stages, *self.images.glob("??")):
            for left in collect(folder, dead=fingerprint):
                self._say(f"removed what a killed run left: {left}")

    def _open(self, home: Path) -> Artifact:
        stage, known = home.parent.name, read_record(home)
        record = verified(home, stage, known)
        if known is not None:
            record = record.model_copy(update={"pushed": known.pushed})
        if record != known:
            write_record(home, record)
        if self.remote is not None and self.remote.url not in record.pushed:
            self.remote.push(stage, home.name, home)
            write_record(home, record.model_copy(update={"pushed": (*record.pushed, self.remote.url)}))
        return Artifact(kind=stage, path=home, digest=record.digest)

    def _fetch(self, remote: RemoteStore, home: Path) -> None:
        with usable(self.root):
            home.parent.mkdir(parents=True, exist_ok=True)
        with whole_folder(home) as folder:
            remote.fetch(home.parent.name, home.name, folder)
            try:
                record = verified(folder, home.parent.name)
            except DataError as error:
                raise DataError(
                    f"the remote copy is damaged: {error.what}",
                    where=f"{remote.url}/{home.parent.name}/{home.name}",
                    remedy="delete the remote folder and run the stage again",
                ) from error
        self._keep(home, record.model_copy(update={"pushed": (remote.url,)}))

    def _keep(self, home: Path, record: Record) -> None:
        """Record what was written, unless another writer was first: then its files are others."""
        if FileState.of(home / MANIFEST) == record.files[MANIFEST][1]:
            write_record(home, record)


def _sign(file: IO[str]) -> None:
    """Say who holds the lock. Unbuffered: what a full disk refuses is not tried again when the file is closed."""
    file.truncate(0)
    who = {"host": socket.gethostname(), "pid": os.getpid(), "since": _now()}
    os.pwrite(file.fileno(), json.dumps(who).encode(), 0)


def _holder(file: IO[str]) -> str:
    file.seek(0)
    try:
        who = json.load(file)
        return f"process {who['pid']} on {who['host']} since {who['since']}"
    except (ValueError, KeyError, TypeError):  # it has just taken the lock, or is of version 0.1
        return "another process"


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def link_folder(source: Path, target: Path) -> None:
    """Put the files of `source` at `target` by hard links (copies on another disk), replacing what is there."""

    def link(from_: str, to: str) -> None:
        try:
            os.link(from_, to)
        except OSError as error:
            if error.errno not in (errno.EXDEV, errno.EPERM):
                raise
            shutil.copyfile(from_, to)

    with replaced_folder(target) as new:
        shutil.copytree(source, new, copy_function=link, dirs_exist_ok=True)
