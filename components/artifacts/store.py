"""The artifact store: finished folders under `<stage>/<fingerprint>`, seen whole or not at all.

<root>/<stage>/<fingerprint>/          a finished artifact
<root>/<stage>/<fingerprint>.digest    its record: an artifact that lies as recorded is not read again
<root>/workspaces/<stage>-<fingerprint>/   what an unfinished attempt can resume from
<root>/replaced/                       what was made again by --force
<root>/images/                         the image store, shared by all artifacts
<root>/remote/                         what remote stores still lack
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import IO
from uuid import uuid4

from tqdm import tqdm

from armature.components.artifacts.disk import (
    CONTENT,
    atomic_folder,
    collect,
    locked_sibling,
    place_folder,
    raising_disk_full,
    raising_store_errors,
    try_lock,
    write_file,
)
from armature.components.artifacts.images import ImageStore
from armature.components.artifacts.manifest import MANIFEST, verify_artifact
from armature.components.artifacts.record import FileState, Record, read_record, record_path, write_record
from armature.components.artifacts.remote import NO_STAGES, RemoteMarker, RemoteStore
from armature.components.artifacts.remote_attempts import CheckpointSender
from armature.components.contracts.errors import DataError, StoreError
from armature.components.contracts.stages import Artifact

AGAIN_SECONDS = 600.0
"""How long a remote store that did not take an artifact is not asked again while artifacts are written."""


class ArtifactStore:
    """A local folder, and optionally a remote that finished artifacts, their images and checkpoints of unfinished
    stages are copied to, and found in.

    An artifact is sent when it is written. Where another machine was first, its artifact takes the place of this one.
    What the remote does not take is kept, and sent by the next stage in this store, or by `send_waiting`.

    Args:
        say: is told what is waited for, and what could not be sent.
    """

    def __init__(self, root: Path, remote: str | None = None, say: Callable[[str], None] = tqdm.write) -> None:
        with raising_store_errors(root):
            self.root = root.resolve()
        self._say = say
        self.remote = RemoteStore(remote, self.root, say) if remote else None
        self._senders: dict[str, CheckpointSender] = {}
        self._away_until = 0.0

    @property
    def images(self) -> Path:
        return self.root / "images"

    def home(self, stage: str, fingerprint: str) -> Path:
        return self.root / stage / fingerprint

    def workspace(self, stage: str, fingerprint: str) -> Path:
        """
        Raises:
            ConfigurationError: see `raising_store_errors`, as for every method.
        """
        folder = self.root / "workspaces" / f"{stage}-{fingerprint}"
        with raising_store_errors(self.root):
            folder.mkdir(parents=True, exist_ok=True)
        return folder

    def find(self, stage: str, fingerprint: str) -> Artifact | None:
        """The finished artifact, fetched from the remote if only that has it; sent there later if only that lacks it.

        Raises:
            DataError: it is not what was made, here or in the remote.
            StoreError: the remote does not answer.
        """
        home = self.home(stage, fingerprint)
        with raising_store_errors(self.root):
            here = os.path.lexists(home)
        if not here:
            marker = self.remote.marker(stage, fingerprint) if self.remote else None
            if self.remote is None or marker is None or not self._fetch(self.remote, home, marker):
                return None
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
        made = self.find(*named) if named and named[0] not in NO_STAGES else None
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
            if not home.is_dir() or home.name.startswith(".") or home.parent.name in NO_STAGES:
                continue
            try:
                verify_artifact(home, home.parent.name, read_record(home), everything=True)
                yield home, None
            except DataError as error:
                yield home, error

    def write(self, stage: str, fingerprint: str, fill: Callable[[Path], None]) -> Artifact:
        """Let `fill` write a new artifact; it appears when complete, and the first writer wins, here and in the remote.

        Returns:
            The artifact that counts, which may be another machine's.

        Raises:
            StoreError: the disk is full, and nothing is left behind.
        """
        home = self.home(stage, fingerprint)
        with raising_store_errors(self.root):
            home.parent.mkdir(parents=True, exist_ok=True)
        with atomic_folder(home) as folder:
            fill(folder)
            record = verify_artifact(folder, stage)
        self._keep(home, record)
        made = self._open(home)
        if self.remote is None or time.monotonic() < self._away_until:
            return made
        self._or_warn(partial(self._send, self.remote, home))
        return self._open(home)

    def send_waiting(self, adopt: bool = True) -> int:
        """Send every artifact that was written or found here and that the remote lacks; their number.

        Args:
            adopt: take the artifacts of machines that were first; else what was made here stays in its place, for
                somebody may be reading it, and is compared again later.

        Raises:
            StoreError: it does not take them. They are kept, and sent when the next stage begins.
            DataError: what it has of one of them is damaged. The others were sent.
        """
        waiting, damage = [self.home(path.parent.name, path.name) for path in self._waiting()], None
        for home in waiting:
            assert self.remote is not None
            try:
                self._send(self.remote, home, adopt)
            except DataError as error:
                damage = damage or error
        if damage is not None:
            raise damage
        return len(waiting)

    def begin(self, stage: str, fingerprint: str, afresh: bool) -> None:
        """Begin an attempt in the remote, and have the newest checkpoint that others have sent in the workspace.
        The caller holds the lock.

        Args:
            afresh: what was sent before does not count.

        Raises:
            DataError: it is damaged.
            StoreError: the remote does not answer.
        """
        if self.remote is not None:
            workspace = self.workspace(stage, fingerprint)
            with raising_disk_full(self.root):
                attempt = self.remote.attempts.begin(workspace, afresh)
            before = partial(self.send_waiting, adopt=False)
            self._senders[workspace.name] = self.remote.attempts.sender(workspace, attempt, before)

    def send_checkpoint(self, stage: str, fingerprint: str, checkpoint: Path, best: Path | None = None) -> None:
        """Have the remote keep this checkpoint, step-NNNNNN in the workspace, once it is complete, in place of the one
        before; with it the files right in the workspace, and the folder `best`. It is sent in the background, after
        every artifact that was made before."""
        if sender := self._senders.get(f"{stage}-{fingerprint}"):
            sender.offer(checkpoint, best)

    def finish(self, stage: str, fingerprint: str) -> None:
        """Send what a stage has made, after which its checkpoints in the remote are of no use and deleted."""
        self.end_checkpoints(stage, fingerprint)
        if self.remote is not None and self.send_waiting_or_warn():
            self._or_warn(partial(self.remote.attempts.remove, f"{stage}-{fingerprint}"))

    def end_checkpoints(self, stage: str, fingerprint: str) -> None:
        """Send no more checkpoints of this attempt; wait for the one that is being sent. The next attempt in this
        process would otherwise send into the same folder at the same time."""
        if sender := self._senders.pop(f"{stage}-{fingerprint}", None):
            sender.end()

    def send_waiting_or_warn(self) -> bool:
        """`send_waiting`; whether the remote has taken everything, which is said where it has not."""
        return self._or_warn(self.send_waiting)

    @contextmanager
    def lock(self, stage: str, fingerprint: str) -> Iterator[None]:
        """Held by the one attempt that makes this artifact; a second attempt says whom it waits for, and waits.

        What killed attempts left half-written in the store is removed.
        """
        workspace = self.workspace(stage, fingerprint)
        with raising_store_errors(self.root):
            file = (workspace / ".lock").open("a+")
        with file:
            if not try_lock(file):
                self._say(f"{stage}: waits for {_holder(file)}, which makes the same artifact ({fingerprint})")
                fcntl.flock(file, fcntl.LOCK_EX)
            with raising_store_errors(self.root):
                self._collect()
                _sign(file)
            self.send_waiting_or_warn()
            yield

    def set_aside(self, stage: str, fingerprint: str) -> None:
        """Move what an attempt has made, finished or not, below `replaced/`, and delete the remote copies.

        The caller holds the lock. The artifact itself goes last: until then, it is the one that is found.
        """
        workspace = self.workspace(stage, fingerprint)
        parts = [path for path in workspace.iterdir() if path.name != ".lock"]
        units = [path for path in self.root.glob(f"*/{fingerprint}-*") if path.parent.name not in NO_STAGES]
        home = self.home(stage, fingerprint)
        with self._sending(fcntl.LOCK_EX):
            aside = self._move_aside(f"{stage}-{fingerprint}", [*parts, *units, record_path(home), home])
            if self.remote is not None:
                self.remote.remove(stage, fingerprint)
        if aside.exists():
            self._say(f"{stage}: made again; what was made before is in {aside}")

    def _move_aside(self, name: str, paths: list[Path]) -> Path:
        aside = self.root / "replaced" / f"{name}-{datetime.now(UTC):%Y%m%dT%H%M%S.%f}"
        with raising_store_errors(self.root):
            for path in paths:
                if os.path.lexists(path):
                    target = aside / path.relative_to(self.root)
                    target.parent.mkdir(parents=True, exist_ok=True)
                    path.rename(target)
        return aside

    def discard(self, stage: str, fingerprint: str) -> None:
        """Delete an artifact, here and in the remote, whose content another one has. Images stay.

        Raises:
            StoreError: the remote does not answer.
        """
        home = self.home(stage, fingerprint)
        record = read_record(home)
        record_path(home).unlink(missing_ok=True)
        shutil.rmtree(home, ignore_errors=True)
        if self.remote is not None and (record is None or self.remote.url in record.pushed):
            self.remote.discard(stage, fingerprint)

    def _collect(self) -> None:
        stages = [path for path in self.root.iterdir() if path.is_dir() and path.name not in NO_STAGES]
        state = [self.remote.state, *self.remote.state.glob("waiting/*")] if self.remote else []
        for folder in (*stages, *state, ImageStore(self.images).unfinished):
            for left in collect(folder):
                self._say(f"removed what a killed run left: {left}")

    def _open(self, home: Path) -> Artifact:
        stage, known = home.parent.name, read_record(home)
        record = verify_artifact(home, stage, known)
        if known is not None:
            record = record.model_copy(update={"pushed": known.pushed})
        if record != known:
            write_record(home, record)
        if self.remote is not None and self.remote.url not in record.pushed:
            self._copy_id(self.remote, home)
        return Artifact(kind=stage, path=home, digest=record.digest)

    def _waiting(self) -> list[Path]:
        """What the remote lacks, `<stage>/<fingerprint>` in a folder; each file has the name of the copy to be sent."""
        paths = self.remote.state.glob("waiting/*/*") if self.remote else ()
        return sorted(path for path in paths if not path.name.startswith("."))  # else it is being written

    def _copy_id(self, remote: RemoteStore, home: Path) -> str:
        path = remote.state / "waiting" / home.parent.name / home.name
        try:
            return path.read_text()
        except FileNotFoundError:
            copy_id = uuid4().hex
        with raising_store_errors(self.root):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_file(path, copy_id.encode())
        return copy_id

    @contextmanager
    def _sending(self, kind: int) -> Iterator[None]:
        """Many may send at once (LOCK_SH); nobody does while artifacts are moved (LOCK_EX)."""
        folder = self.root / "remote"
        with raising_store_errors(self.root):
            folder.mkdir(parents=True, exist_ok=True)
            file = (folder / ".lock").open("a+")
        with file:
            fcntl.flock(file, kind)
            yield

    def _send(self, remote: RemoteStore, home: Path, adopt: bool = True) -> None:
        with raising_disk_full(self.root), self._sending(fcntl.LOCK_SH):
            record = read_record(home) if home.is_dir() else None
            if record is None or remote.url in record.pushed:  # set aside or discarded; or sent by another process
                marker = None
            else:
                try:
                    marker = remote.push(home.parent.name, home.name, home, record, self._copy_id(remote, home))
                except (StoreError, OSError):
                    if read_record(home) is not None:
                        raise
                    marker = None  # discarded while it was being sent
                if marker is not None and marker.digest == record.digest:
                    write_record(home, record.model_copy(update={"pushed": (*record.pushed, remote.url)}))
                    marker = None
        if marker is not None:
            if not adopt:
                return
            try:
                self._adopt(remote, home, marker)
            except DataError:
                if remote.marker(home.parent.name, home.name) == marker:
                    raise
                return  # it was deleted meanwhile
        (remote.state / "waiting" / home.parent.name / home.name).unlink(missing_ok=True)

    def _or_warn(self, send: Callable[[], object]) -> bool:
        """Whether `send` was possible; else it is said what becomes of what is here."""
        try:
            send()
        except (StoreError, DataError) as error:
            if isinstance(error, StoreError):
                self._away_until = time.monotonic() + AGAIN_SECONDS
            self._say(
                f"warning: not sent to the remote store: {error}\nWhat was made is kept in {self.root}. The next stage "
                "that begins there sends it, or `armature store send RECIPE`."
            )
            return False
        self._away_until = 0.0
        return True

    def _fetch(self, remote: RemoteStore, home: Path, marker: RemoteMarker) -> bool:
        """Fetch an artifact, unless it is deleted meanwhile."""
        with raising_store_errors(self.root):
            home.parent.mkdir(parents=True, exist_ok=True)
        try:
            with atomic_folder(home) as folder:
                record = _fetched(remote, home, marker, folder)
        except DataError:
            if remote.marker(home.parent.name, home.name) != marker:
                return False
            raise
        self._keep(home, record)
        return True

    def _adopt(self, remote: RemoteStore, home: Path, marker: RemoteMarker) -> None:
        """Put the artifact of the machine that was first in the place of the one that was made here."""
        name = f"{home.parent.name}-{home.name}"
        with raising_disk_full(self.root), locked_sibling(home) as work:
            folder = work / CONTENT
            folder.mkdir()
            record = _fetched(remote, home, marker, folder)
            with self._sending(fcntl.LOCK_EX):
                made = read_record(home) if home.is_dir() else None
                if made is None or remote.url in made.pushed:
                    return  # set aside meanwhile, or another process has adopted it
                aside = self._move_aside(name, [record_path(home), home])
                place_folder(folder, home)  # unless `find` of another process was quicker, with the same artifact
                self._keep(home, record)
        self._say(
            f"{home.parent.name}: another machine was first to make {home.name}, and its artifact is taken "
            f"(digest {marker.digest}); what was made here is in {aside}"
        )

    def _keep(self, home: Path, record: Record) -> None:
        """Record what was written, unless another writer was first: then its files are others."""
        if FileState.of(home / MANIFEST) == record.files[MANIFEST][1]:
            write_record(home, record)


def _fetched(remote: RemoteStore, home: Path, marker: RemoteMarker, folder: Path) -> Record:
    """Fetch an artifact into `folder`, with its images.

    Raises:
        DataError: it is damaged, or a file of it is gone.
        StoreError: the remote does not answer.
    """
    stage, fingerprint = home.parent.name, home.name
    remote.fetch(stage, fingerprint, marker, folder)
    damage = None
    try:
        record = verify_artifact(folder, stage)
        if record.digest != marker.digest:
            damage = DataError(f"the digest of its files is {record.digest}, not {marker.digest}")
    except DataError as error:
        damage = error
    if damage is not None:
        raise DataError(
            f"the remote copy is damaged: {damage.what}",
            code="remote_copy_damaged",
            where=f"{remote.url}/{stage}/{fingerprint}",
            remedy="delete the remote folder and run the stage again",
        ) from damage
    remote.fetch_images(stage, fingerprint, marker, folder)
    return record.model_copy(update={"pushed": (remote.url,)})


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
