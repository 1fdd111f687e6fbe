"""The artifact store: finished folders under `<stage>/<fingerprint>`, seen whole or not at all.

<root>/<stage>/<fingerprint>/          a finished artifact
<root>/<stage>/<fingerprint>.digest    its record: an artifact that lies as recorded is not read again
<root>/workspaces/<stage>-<fingerprint>/   what an unfinished attempt can resume from
<root>/replaced/                       what was made again by --force
<root>/images/                         the image store, shared by all artifacts
<root>/remote/                         what remote stores still lack, and which images they have
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO

from tqdm import tqdm

from armature.components.artifacts.disk import collect, full_disk_said, link_folder, try_lock, usable, whole_folder
from armature.components.artifacts.images import ImageStore
from armature.components.artifacts.manifest import MANIFEST, verified
from armature.components.artifacts.outbox import Entry, Outbox
from armature.components.artifacts.record import FileState, Record, read_record, record_path, write_record
from armature.components.artifacts.remote import RemoteStore
from armature.components.contracts.errors import DataError
from armature.components.contracts.stages import Artifact

NO_ARTIFACTS = frozenset({"images", "remote", "replaced", "workspaces"})
INCOMPLETE_SECONDS = 3600.0
"""A checkpoint that is not complete after this long is one of a run that was killed."""


class ArtifactStore:
    """A local folder, and optionally a remote that finished artifacts, their images and checkpoints of unfinished
    stages are copied to, in the background, and found in.

    Args:
        say: is told what is waited for.
    """

    def __init__(self, root: Path, remote: str | None = None, say: Callable[[str], None] = tqdm.write) -> None:
        with usable(root):
            self.root = root.resolve()
        self._say = say
        self.remote = RemoteStore(remote, self.root, say) if remote else None
        self._outbox = Outbox(self.remote.outbox, self._send, say) if self.remote else None

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
        """The finished artifact, fetched from the remote if only that has it; sent there later if only that lacks it.

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
            StoreError: the remote does not answer.
        """
        if len(digest) < 6:
            return None
        found = next((each for each in self if each.digest.startswith(digest)), None)
        if found is not None or self.remote is None:
            return self._open(found.path) if found else None
        named = self.remote.find_digest(digest)
        made = self.find(*named) if named else None
        return made if made is not None and made.digest.startswith(digest) else None

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
            StoreError: the disk is full, and nothing is left behind.
        """
        home = self.home(stage, fingerprint)
        with usable(self.root):
            home.parent.mkdir(parents=True, exist_ok=True)
        with whole_folder(home) as folder:
            fill(folder)
            record = verified(folder, stage)
        self._keep(home, record)
        return self._open(home)

    def settle(self) -> None:
        """Wait until the remote has every artifact that was written or found here.

        Raises:
            StoreError: it does not take them. They are kept, and sent when the store is used next.
        """
        if self._outbox is not None:
            self._outbox.settle()

    def send_checkpoint(self, stage: str, fingerprint: str, checkpoint: Path, best: Path | None = None) -> None:
        """Have the remote keep this checkpoint, step-NNNNNN in the workspace, once it is complete, in place of the one
        before; with it the files right in the workspace, and the folder `best`. It is sent after every artifact that
        was made before.

        Raises:
            StoreError: another machine has taken over.
        """
        if self._outbox is not None and self.remote is not None:
            workspace = self.workspace(stage, fingerprint)
            self.remote.leases.refuse_lost(workspace.name)
            names = [
                path.resolve().relative_to(workspace).as_posix() for path in (checkpoint, best) if path is not None
            ]
            self._outbox.add(stage, fingerprint, names[0], tuple(names[1:]))

    def fetch_checkpoint(self, stage: str, fingerprint: str) -> None:
        """Have the newest checkpoint in the workspace, if the remote has one that is newer than those here.

        Raises:
            DataError: it is damaged.
            StoreError: the remote does not answer.
        """
        if self.remote is not None:
            with full_disk_said(self.root):
                self.remote.checkpoints.fetch(self.workspace(stage, fingerprint), self._say)

    def finish(self, stage: str, fingerprint: str) -> None:
        """`settle` what a stage has made, after which its checkpoint in the remote is of no use and deleted.

        Raises:
            StoreError: see `settle`.
        """
        if self._outbox is not None and self.remote is not None:
            self._outbox.forget_checkpoint(stage, fingerprint)
            self.settle()
            self.remote.checkpoints.remove(f"{stage}-{fingerprint}")

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
                self._collect()
                _sign(file)
            if self._outbox is not None:
                self._outbox.start()
            yield

    def lease(self, stage: str, fingerprint: str) -> AbstractContextManager[None]:
        """Held by the one machine that makes this artifact, where several share a remote; others say whom they wait
        for, and wait. The caller holds the lock.

        Raises:
            StoreError: the remote does not answer.
        """
        return self.remote.leases.held(f"{stage}-{fingerprint}") if self.remote else nullcontext()

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
        if self._outbox is not None and self.remote is not None:
            with self._outbox.held():
                self.remote.remove(stage, fingerprint)
        if aside.exists():
            self._say(f"{stage}: made again; what was made before is in {aside}")

    def discard(self, stage: str, fingerprint: str) -> None:
        """Delete an artifact, here and in the remote, whose content another one has. Images stay.

        Raises:
            StoreError: the remote does not answer.
        """
        home = self.home(stage, fingerprint)
        record_path(home).unlink(missing_ok=True)
        shutil.rmtree(home, ignore_errors=True)
        if self.remote is not None:
            self.remote.discard(stage, fingerprint)

    def _collect(self) -> None:
        stages = [path for path in self.root.iterdir() if path.is_dir() and path.name not in NO_ARTIFACTS]
        for folder in (*stages, ImageStore(self.images).unfinished):
            for left in collect(folder):
                self._say(f"removed what a killed run left: {left}")

    def _open(self, home: Path) -> Artifact:
        stage, known = home.parent.name, read_record(home)
        record = verified(home, stage, known)
        if known is not None:
            record = record.model_copy(update={"pushed": known.pushed})
        if record != known:
            write_record(home, record)
        if self._outbox is not None and self.remote is not None and self.remote.url not in record.pushed:
            self._outbox.add(stage, home.name)
        return Artifact(kind=stage, path=home, digest=record.digest)

    def _send(self, entry: Entry) -> bool:
        if entry.checkpoint is not None:
            return self._send_checkpoint(entry, entry.checkpoint)
        remote, home = self.remote, self.home(entry.stage, entry.fingerprint)
        assert remote is not None
        if not home.is_dir() or (record := read_record(home)) is None:
            return True  # set aside
        remote.push(entry.stage, entry.fingerprint, home, record.digest)
        write_record(home, record.model_copy(update={"pushed": (*record.pushed, remote.url)}))
        return True

    def _send_checkpoint(self, entry: Entry, checkpoint: str) -> bool:
        workspace, remote = self.workspace(entry.stage, entry.fingerprint), self.remote
        assert remote is not None
        if not (workspace / checkpoint).is_dir():
            return time.time_ns() - entry.number > INCOMPLETE_SECONDS * 1e9
        remote.scratch.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=remote.scratch) as scratch:
            # The trainer removes old checkpoints: links keep this one as long as it is being sent.
            for name in (checkpoint, *entry.more):
                if (workspace / name).is_dir():
                    link_folder(workspace / name, Path(scratch, name))
            for path in workspace.iterdir():
                if path.is_file() and not path.name.startswith("."):
                    shutil.copyfile(path, Path(scratch, path.name))
            remote.checkpoints.push(workspace.name, entry.number, Path(scratch), checkpoint)
        return True

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
                    code="remote_copy_damaged",
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
    except (ValueError, KeyError, TypeError):  # it has just taken the lock
        return "another process"


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
