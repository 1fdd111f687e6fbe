"""The artifact store: a finished result is a folder `<stage>/<fingerprint>`, which other processes see whole or not at
all.

<root>/<stage>/<fingerprint>/              a finished artifact
<root>/<stage>/<fingerprint>.digest        its record, by which unchanged files are recognized without reading them
<root>/workspaces/<stage>-<fingerprint>/   files from which an unfinished attempt can resume
<root>/replaced/                           artifacts that --force made again
<root>/images/                             the image store, shared by all artifacts
<root>/remote/                             artifacts that still have to be sent to a remote store
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
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

RETRY_AFTER_S = 600.0
"""Seconds in which nothing is sent after a remote store has failed to take an artifact."""


class ArtifactStore:
    """A local folder of finished artifacts, with an optional remote copy.

    Finished artifacts, their images and the checkpoints of unfinished stages are copied to the remote and looked up
    there. An artifact is sent as soon as it is written. If another machine has already sent an artifact of the same
    stage and fingerprint, that one replaces the local one. Artifacts that the remote does not take are kept, and sent
    when the next stage in this store begins, or by `send_waiting`.

    All methods raise ConfigurationError if the folder cannot be used as a store (see `raising_store_errors`).

    Args:
        root: folder of the store; created when needed.
        remote: fsspec URL or folder of the remote copy.
        say: receives messages about waiting and about artifacts that could not be sent.

    Example:
        >>> import tempfile
        >>> from armature.components.artifacts.manifest import write_manifest
        >>> store = ArtifactStore(Path(tempfile.mkdtemp()))
        >>> def fill(folder):
        ...     (folder / "answer.txt").write_text("42")
        ...     write_manifest(folder, kind="demo", kind_version=1, rows={}, drops={}, inputs={}, settings={})
        >>> artifact = store.write("demo", "f1", fill)
        >>> store.find("demo", "f1") == artifact, store.find("demo", "f2")
        (True, None)
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
        """Folder of the image store."""
        return self.root / "images"

    def home(self, stage: str, fingerprint: str) -> Path:
        """Path of an artifact's folder, which need not exist."""
        return self.root / stage / fingerprint

    def workspace(self, stage: str, fingerprint: str) -> Path:
        """Return the folder for unfinished work on an artifact; it is created if it does not exist."""
        folder = self.root / "workspaces" / f"{stage}-{fingerprint}"
        with raising_store_errors(self.root):
            folder.mkdir(parents=True, exist_ok=True)
        return folder

    def find(self, stage: str, fingerprint: str) -> Artifact | None:
        """Return a finished artifact, or None. If only the remote has it, it is fetched; if only the remote lacks it,
        it is sent later.

        Raises:
            DataError: the files here or in the remote differ from what was written.
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
        """Return the finished artifact whose digest begins with `digest`, at least 6 characters; None if there is no
        such artifact.

        Raises:
            DataError: its files differ from what was written.
            StoreError: the remote does not answer.
        """
        if len(digest) < 6:
            return None
        local = next((each for each in self if each.digest.startswith(digest)), None)
        if local is not None or self.remote is None:
            return self._open(local.path) if local else None
        named = self.remote.find_digest(digest)
        fetched = self.find(*named) if named and named[0] not in NO_STAGES else None
        return fetched if fetched is not None and fetched.digest.startswith(digest) else None

    def __iter__(self) -> Iterator[Artifact]:
        """Yield every finished local artifact as recorded, without checking its files."""
        for path in sorted(self.root.glob("*/*.digest")):
            home = path.with_suffix("")
            if home.is_dir() and (record := read_record(home)):
                yield Artifact(kind=home.parent.name, path=home, digest=record.digest)

    def verify(self) -> Iterator[tuple[Path, DataError | None]]:
        """Read every file of every local artifact. Yield each artifact's folder and its error, None if it is
        unchanged."""
        for home in sorted(self.root.glob("*/*")):
            if not home.is_dir() or home.name.startswith(".") or home.parent.name in NO_STAGES:
                continue
            try:
                verify_artifact(home, home.parent.name, read_record(home), everything=True)
                yield home, None
            except DataError as error:
                yield home, error

    def write(self, stage: str, fingerprint: str, fill: Callable[[Path], None]) -> Artifact:
        """Call `fill` with a temporary folder, which becomes the artifact when it is complete. The first writer wins,
        here and in the remote.

        Returns:
            The artifact that counts; another machine may have made it.

        Raises:
            StoreError: the disk is full. Nothing is left behind.
        """
        home = self.home(stage, fingerprint)
        with raising_store_errors(self.root):
            home.parent.mkdir(parents=True, exist_ok=True)
        with atomic_folder(home) as folder:
            fill(folder)
            record = verify_artifact(folder, stage)
        self._write_record(home, record)
        made = self._open(home)
        if self.remote is None or time.monotonic() < self._away_until:
            return made
        self._or_warn(partial(self._send, self.remote, home))
        return self._open(home)

    def send_waiting(self, adopt: bool = True) -> int:
        """Send every local artifact that the remote lacks. Return how many were waiting.

        Args:
            adopt: replace local artifacts by the ones of machines that were first. If False, the local ones remain,
                since another process may be reading them, and are compared again later.

        Raises:
            StoreError: the remote does not take them. They are kept, and sent when the next stage begins.
            DataError: the remote copy of one of them is damaged. The others were sent.
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
        """Register this process's attempt at an artifact in the remote store, and fetch the newest checkpoint that
        other machines sent.

        The caller holds the lock of the artifact.

        Args:
            afresh: ignore checkpoints that were sent before.

        Raises:
            DataError: the checkpoint is damaged.
            StoreError: the remote does not answer.
        """
        if self.remote is not None:
            workspace = self.workspace(stage, fingerprint)
            with raising_disk_full(self.root):
                attempt = self.remote.attempts.begin(workspace, afresh)
            before = partial(self.send_waiting, adopt=False)
            self._senders[workspace.name] = self.remote.attempts.sender(workspace, attempt, before)

    def send_checkpoint(self, stage: str, fingerprint: str, checkpoint: Path, best: Path | None = None) -> None:
        """Send a checkpoint to the remote in the background, replacing the previous one there.

        Sending begins once the checkpoint is complete and every artifact made before has been sent. The files directly
        in the workspace and the folder `best` are sent with it.

        Args:
            checkpoint: the folder step-NNNNNN in the workspace; it may not exist yet.
            best: folder of the best weights so far.
        """
        if sender := self._senders.get(f"{stage}-{fingerprint}"):
            sender.offer(checkpoint, best)

    def finish(self, stage: str, fingerprint: str) -> None:
        """Send all waiting artifacts, then delete the remote checkpoints of this artifact, which are no longer
        needed."""
        self.end_checkpoints(stage, fingerprint)
        if self.remote is not None and self.send_waiting_or_warn():
            self._or_warn(partial(self.remote.attempts.remove, f"{stage}-{fingerprint}"))

    def end_checkpoints(self, stage: str, fingerprint: str) -> None:
        """Stop sending checkpoints of this attempt, and wait for the one in progress.

        The next attempt in this process would otherwise send into the same remote folder at the same time.
        """
        if sender := self._senders.pop(f"{stage}-{fingerprint}", None):
            sender.end()

    def send_waiting_or_warn(self) -> bool:
        """Call `send_waiting`. Return True if the remote took everything, else print a warning and return False."""
        return self._or_warn(self.send_waiting)

    @contextmanager
    def lock(self, stage: str, fingerprint: str) -> Iterator[None]:
        """Hold the lock of an artifact while the block makes it.

        If another process holds the lock, print which one, and wait. Then remove temporary files that killed attempts
        left in the store.
        """
        workspace = self.workspace(stage, fingerprint)
        with raising_store_errors(self.root):
            file = (workspace / ".lock").open("a+")
        with file:
            if not try_lock(file):
                self._say(f"{stage}: waiting for {_holder(file)}, which is making the same artifact ({fingerprint})")
                fcntl.flock(file, fcntl.LOCK_EX)
            with raising_store_errors(self.root):
                self._remove_leftovers()
                _sign(file)
            self.send_waiting_or_warn()
            yield

    def set_aside(self, stage: str, fingerprint: str) -> None:
        """Move an artifact, the artifacts of its parts (`*/<fingerprint>-<number>`) and its workspace to `replaced/`,
        and delete the remote copies.

        The caller holds the lock. The artifact itself is moved last, so other processes find it until then.
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
            self._say(f"{stage}: made again; the previous result is in {aside}")

    def _move_aside(self, name: str, paths: list[Path]) -> Path:
        """Move `paths` to a new folder below `replaced/`, and return that folder. It does not exist if no path did."""
        aside = self.root / "replaced" / f"{name}-{datetime.now(UTC):%Y%m%dT%H%M%S.%f}"
        with raising_store_errors(self.root):
            for path in paths:
                if os.path.lexists(path):
                    target = aside / path.relative_to(self.root)
                    target.parent.mkdir(parents=True, exist_ok=True)
                    path.rename(target)
        return aside

    def discard(self, stage: str, fingerprint: str) -> None:
        """Delete an artifact here and in the remote, once another artifact contains its content. Images stay.

        Raises:
            StoreError: the remote does not answer.
        """
        home = self.home(stage, fingerprint)
        record = read_record(home)
        record_path(home).unlink(missing_ok=True)
        shutil.rmtree(home, ignore_errors=True)
        if self.remote is not None and (record is None or self.remote.url in record.pushed):
            self.remote.discard(stage, fingerprint)

    def _remove_leftovers(self) -> None:
        """Remove temporary files of killed processes from all folders of the store."""
        stages = [path for path in self.root.iterdir() if path.is_dir() and path.name not in NO_STAGES]
        state = [self.remote.state, *self.remote.state.glob("waiting/*")] if self.remote else []
        for folder in (*stages, *state, ImageStore(self.images).unfinished):
            for left in collect(folder):
                self._say(f"removed temporary files of a killed run: {left}")

    def _open(self, home: Path) -> Artifact:
        """Check an artifact against its manifest, update its record, and note it for sending if the remote lacks it."""
        stage, previous, began = home.parent.name, read_record(home), time.time_ns()
        record = verify_artifact(home, stage, previous)
        if previous is not None:
            record = record.model_copy(update={"pushed": previous.pushed})
        if record != previous:
            write_record(home, record)
        elif record.trusted_at(began):
            with suppress(OSError):  # a store that cannot be written: its files are read again each time
                if not record.trusted_at(record_path(home).stat().st_mtime_ns):
                    os.utime(record_path(home), ns=(began, began))
        if self.remote is not None and self.remote.url not in record.pushed:
            self._copy_id(self.remote, home)
        return Artifact(kind=stage, path=home, digest=record.digest)

    def _waiting(self) -> list[Path]:
        """Return the notes about artifacts that the remote lacks. A note is a file named `<stage>/<fingerprint>`; it
        contains the id of the copy to send."""
        paths = self.remote.state.glob("waiting/*/*") if self.remote else ()
        return sorted(path for path in paths if not path.name.startswith("."))  # hidden files are still being written

    def _copy_id(self, remote: RemoteStore, home: Path) -> str:
        """Return the random id of this machine's copy of an artifact. The id is stored in the note that the artifact
        waits to be sent."""
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
        """Hold the lock for sending during the block. With LOCK_SH the block may send artifacts, which many processes
        may do at once. With LOCK_EX it may move artifacts, while no process sends."""
        folder = self.root / "remote"
        with raising_store_errors(self.root):
            folder.mkdir(parents=True, exist_ok=True)
            file = (folder / ".lock").open("a+")
        with file:
            fcntl.flock(file, kind)
            yield

    def _send(self, remote: RemoteStore, home: Path, adopt: bool = True) -> None:
        """Send one artifact.

        Another machine may have sent an artifact under the same name before. With `adopt` that one replaces ours;
        without `adopt` ours is not sent now.
        """
        with raising_disk_full(self.root), self._sending(fcntl.LOCK_SH):
            record = read_record(home) if home.is_dir() else None
            if record is None or remote.url in record.pushed:  # set aside, discarded, or sent by another process
                marker = None
            else:
                try:
                    marker = remote.push(home.parent.name, home.name, home, record, self._copy_id(remote, home))
                except (StoreError, OSError):
                    if read_record(home) is not None:
                        raise
                    marker = None  # the artifact was discarded while it was being sent
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
                return  # the remote artifact was deleted meanwhile
        (remote.state / "waiting" / home.parent.name / home.name).unlink(missing_ok=True)

    def _or_warn(self, send: Callable[[], object]) -> bool:
        """Call `send` and return True. If it raises an error, print a warning and return False. If the remote did not
        answer, nothing more is sent for RETRY_AFTER_S."""
        try:
            send()
        except (StoreError, DataError) as error:
            if isinstance(error, StoreError):
                self._away_until = time.monotonic() + RETRY_AFTER_S
            self._say(
                f"warning: not sent to the remote store: {error}\nThe artifacts are kept in {self.root}. They are sent "
                "when the next stage begins there, or by `armature store send RECIPE`."
            )
            return False
        self._away_until = 0.0
        return True

    def _fetch(self, remote: RemoteStore, home: Path, marker: RemoteMarker) -> bool:
        """Fetch an artifact from the remote. Return False if it was deleted there meanwhile."""
        with raising_store_errors(self.root):
            home.parent.mkdir(parents=True, exist_ok=True)
        try:
            with atomic_folder(home) as folder:
                record = _fetch_artifact(remote, home, marker, folder)
        except DataError:
            if remote.marker(home.parent.name, home.name) != marker:
                return False
            raise
        self._write_record(home, record)
        return True

    def _adopt(self, remote: RemoteStore, home: Path, marker: RemoteMarker) -> None:
        """Replace a local artifact by the one of the machine that was first, and move the local one to `replaced/`."""
        name = f"{home.parent.name}-{home.name}"
        with raising_disk_full(self.root), locked_sibling(home) as work:
            folder = work / CONTENT
            folder.mkdir()
            record = _fetch_artifact(remote, home, marker, folder)
            with self._sending(fcntl.LOCK_EX):
                made = read_record(home) if home.is_dir() else None
                if made is None or remote.url in made.pushed:
                    return  # the artifact was set aside meanwhile, or another process has adopted it
                aside = self._move_aside(name, [record_path(home), home])
                place_folder(folder, home)  # unless another process has fetched the same artifact meanwhile
                self._write_record(home, record)
        self._say(
            f"{home.parent.name}: another machine was first to make {home.name}, and its artifact is used "
            f"(digest {marker.digest}); the one made here is in {aside}"
        )

    def _write_record(self, home: Path, record: Record) -> None:
        """Write the record of a new artifact. If another writer was first, the record would not describe the files, so
        nothing is written."""
        if FileState.of(home / MANIFEST) == record.files[MANIFEST][1]:
            write_record(home, record)


def _fetch_artifact(remote: RemoteStore, home: Path, marker: RemoteMarker, folder: Path) -> Record:
    """Fetch an artifact with its images into `folder`. Return its record.

    Raises:
        DataError: the remote copy is damaged, or one of its files is missing.
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
    """Write into a lock file which process holds the lock. The write is unbuffered, so closing does not retry one that
    a full disk refused."""
    file.truncate(0)
    since = datetime.now(UTC).isoformat(timespec="seconds")
    os.pwrite(file.fileno(), json.dumps({"host": socket.gethostname(), "pid": os.getpid(), "since": since}).encode(), 0)


def _holder(file: IO[str]) -> str:
    """Describe the process that holds a lock, as `_sign` recorded it."""
    file.seek(0)
    try:
        who = json.load(file)
        return f"process {who['pid']} on {who['host']} since {who['since']}"
    except (ValueError, KeyError, TypeError):  # the other process has just taken the lock and not yet signed it
        return "another process"
