"""Attempts at an artifact by machines that share a remote store, and the newest checkpoint of each attempt.

<url>/attempts/<stage>-<fingerprint>/<number>.json            the process that made this attempt
<url>/attempts/<stage>-<fingerprint>/<number>/newest.json     the files of its newest checkpoint
<url>/attempts/<stage>-<fingerprint>/<number>/<md5>           these files, by content

An attempt's number is created exclusively and never reused, so each attempt has exactly one successor. An attempt
starts from the newest checkpoint of all earlier attempts and writes only below its own number, so no checkpoint
replaces one of another attempt. Machines do not wait for each other, and their clocks are not compared: if two make the
same artifact, the one that finishes first creates its marker.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import UTC, datetime
from pathlib import Path
from threading import Lock, Thread
from uuid import uuid4

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from armature.components.artifacts.disk import link_folder, sync_tree, write_file
from armature.components.artifacts.remote_folder import Files, RemoteFolder, Source
from armature.components.contracts.digests import file_digest
from armature.components.contracts.errors import ArmatureError, DataError
from armature.components.contracts.files import confined

ATTEMPTS = "attempts"
NEWEST = "newest.json"
ATTEMPT_FILE = ".attempt"
"""Name of the file in a workspace that describes the attempt (`RemoteAttempt`) the workspace belongs to."""
POLL_S = 0.5
"""Seconds between two checks whether a checkpoint is complete."""
INCOMPLETE_S = 3600.0
"""Seconds after which an incomplete checkpoint is given up."""
_STEP = re.compile(r"step-(\d+)")


class RemoteAttempt(BaseModel):
    """One attempt at making an artifact, by one process on one machine.

    Attributes:
        id: random name of the attempt.
        number: position among the attempts at the same artifact.
        afresh: ignore checkpoints of earlier attempts, as --force asks for.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    id: str = Field(default_factory=lambda: uuid4().hex)
    number: int
    host: str = Field(default_factory=socket.gethostname)
    pid: int = Field(default_factory=os.getpid)
    since: str = Field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))
    afresh: bool = False

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host} since {self.since}"


class NewestCheckpoint(BaseModel):
    """Files of an attempt's newest checkpoint.

    Attributes:
        checkpoint: relative path of the checkpoint's folder in the workspace; its name is step-NNNNNN.
        parts: relative paths of the files and folders that are each replaced as a whole, the checkpoint among them.
        files: MD5 and size in bytes of each file, by relative path.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    checkpoint: str
    parts: tuple[str, ...]
    files: Files

    @property
    def steps(self) -> int:
        """Number of training steps in the checkpoint."""
        return _steps(self.checkpoint)


class RemoteAttempts:
    """Attempts and their checkpoints in a remote store. Methods raise StoreError and DataError as `RemoteFolder` does.

    Args:
        files: the remote store.
        scratch: returns a new temporary folder on the disk of the local store.
        say: receives messages.
    """

    def __init__(
        self, files: RemoteFolder, scratch: Callable[[], AbstractContextManager[Path]], say: Callable[[str], None]
    ) -> None:
        self._files, self.scratch, self.say = files, scratch, say

    def begin(self, workspace: Path, afresh: bool) -> RemoteAttempt:
        """Register an attempt, or continue the one that this workspace belongs to. Then fetch the newest checkpoint of
        all attempts, unless the workspace has one with at least as many steps.

        Raises:
            DataError: the remote checkpoint is damaged.
        """
        home, mine = f"{ATTEMPTS}/{workspace.name}", self._current_attempt(workspace)
        others = [each for each in self._attempts(home) if mine is None or each.id != mine.id]
        if mine is None:
            mine = self._register(home, others, afresh)
            write_file(workspace / ATTEMPT_FILE, mine.model_dump_json().encode())
        first = max((each.number for each in (*others, mine) if each.afresh), default=0)
        before = [each for each in others if first <= each.number]
        if before and not afresh:
            self.say(
                f"{before[-1]} has begun the same work ({workspace.name}); if it still runs, the first to finish counts"
            )
        homes = [f"{home}/{each.number:06d}" for each in before]
        while (best := self._newest_checkpoint(homes)) is not None:
            try:
                self._fetch(workspace, *best)
                break
            except DataError:
                if self._newest_checkpoint(homes) == best:
                    raise  # otherwise its machine has replaced the checkpoint meanwhile: try the new one
        return mine

    def send(self, workspace: str, attempt: RemoteAttempt, snapshot: Path, checkpoint: str) -> None:
        """Replace this attempt's remote checkpoint by the files in `snapshot`. Files that are already there are not
        sent again.

        Args:
            workspace: name of the workspace.
            attempt: the attempt that the checkpoint belongs to.
            snapshot: folder with the checkpoint and the files that belong to it.
            checkpoint: path of the checkpoint relative to `snapshot`.
        """
        home = f"{ATTEMPTS}/{workspace}/{attempt.number:06d}"
        paths = {path.relative_to(snapshot).as_posix(): path for path in snapshot.rglob("*") if path.is_file()}
        files = {name: (file_digest(path), path.stat().st_size) for name, path in paths.items()}
        before = self._files.put(home, {md5: paths[name] for name, (md5, _) in files.items()})
        within = Path(checkpoint).parts[0]
        parts = (*sorted({name.split("/")[0] for name in paths} - {within}), checkpoint)
        self._files.write(f"{home}/{NEWEST}", NewestCheckpoint(checkpoint=checkpoint, parts=parts, files=files))
        for md5 in set(before) - {md5 for md5, _ in files.values()} - {NEWEST}:
            self._files.remove(f"{home}/{md5}")
        self.say(f"sent the checkpoint of step {_steps(checkpoint)} to the remote store")

    def _newest_checkpoint(self, homes: list[str]) -> tuple[str, NewestCheckpoint] | None:
        """Return the newest checkpoint in these remote folders, together with the folder it is in. Return None if no
        folder has one."""
        read = [(home, self._files.read(f"{home}/{NEWEST}", NewestCheckpoint)) for home in homes]
        saved = [(home, newest) for home, newest in read if newest is not None]
        return max(saved, key=lambda each: each[1].steps, default=None)

    def remove(self, workspace: str) -> None:
        """Delete the checkpoints of all attempts. No later attempt gets the number of an earlier one."""
        home = f"{ATTEMPTS}/{workspace}"
        for name in self._files.listed(home):
            if name.isdecimal():
                self._files.remove(f"{home}/{name}/{NEWEST}")
                self._files.remove(f"{home}/{name}")

    def sender(self, workspace: Path, attempt: RemoteAttempt, before: Callable[[], object]) -> CheckpointSender:
        """Return the sender of an attempt's checkpoints."""
        return CheckpointSender(self, workspace, attempt, before)

    def _current_attempt(self, workspace: Path) -> RemoteAttempt | None:
        """Return the attempt that a workspace belongs to. Return None if there is no such attempt or the remote store
        does not know it."""
        try:
            mine = RemoteAttempt.model_validate_json((workspace / ATTEMPT_FILE).read_bytes())
        except (FileNotFoundError, ValidationError):
            return None
        name = f"{ATTEMPTS}/{workspace.name}/{mine.number:06d}.json"
        return mine if self._files.read(name, RemoteAttempt) == mine else None

    def _attempts(self, home: str) -> list[RemoteAttempt]:
        """Return all attempts that are registered in the remote folder `home`."""
        names = [name for name in self._files.listed(home) if name.endswith(".json")]
        read = (self._files.read(f"{home}/{name}", RemoteAttempt) for name in names)
        return [attempt for attempt in read if attempt is not None]

    def _register(self, home: str, others: list[RemoteAttempt], afresh: bool) -> RemoteAttempt:
        """Register a new attempt under the next free number. Attempts that other machines register meanwhile are added
        to `others`."""
        number = max((each.number for each in others), default=0)
        while True:
            number += 1
            mine, name = RemoteAttempt(number=number, afresh=afresh), f"{home}/{number:06d}.json"
            # If the answer to the first request was lost, the retry finds the document that the first one created.
            if self._files.create(name, mine) or (taken := self._files.read(name, RemoteAttempt)) == mine:
                return mine
            if taken is not None:
                others.append(taken)

    def _fetch(self, workspace: Path, home: str, newest: NewestCheckpoint) -> None:
        """Replace parts of the workspace by a remote checkpoint, unless the workspace has one with at least as many
        steps."""
        where = f"{self._files.url}/{home}/{NEWEST}"
        for name in newest.files:
            if (
                name.startswith(".") or str(confined(name, where)) != name
            ):  # reject "./x", whose first part would be "."
                raise _damaged(where, f"the name {name!r}")
        for part in (newest.checkpoint, *newest.parts):
            if not any(f"{name}/".startswith(f"{part}/") for name in newest.files):
                raise _damaged(where, f"there are no files in {part!r}")
        here = [_steps(path.name) for path in (workspace / newest.checkpoint).parent.glob("step-*")]
        if max(here, default=-1) >= newest.steps:
            return
        with self.scratch() as scratch:
            folder = scratch / "fetched"
            self._files.get(
                {folder / name: Source(f"{home}/{md5}", size) for name, (md5, size) in newest.files.items()}
            )
            for name, (md5, _) in newest.files.items():
                if file_digest(folder / name) != md5:
                    raise _damaged(f"{self._files.url}/{home}/{md5}", "the content has another MD5")
            sync_tree(folder)
            for part in (*(part for part in newest.parts if part != newest.checkpoint), newest.checkpoint):
                target = workspace / part
                if target.is_dir():
                    shutil.rmtree(target)
                target.parent.mkdir(parents=True, exist_ok=True)
                (folder / part).rename(target)
        self.say(f"fetched the checkpoint of step {newest.steps} from the remote store")


class CheckpointSender:
    """Sends the checkpoints of one attempt in the background, each once it is complete. A newer checkpoint takes
    precedence.

    Args:
        before: is called before each checkpoint to send the artifacts that the checkpoint depends on.
    """

    def __init__(
        self, attempts: RemoteAttempts, workspace: Path, attempt: RemoteAttempt, before: Callable[[], object]
    ) -> None:
        self._attempts, self._workspace, self._attempt, self._before = attempts, workspace, attempt, before
        self._guard, self._threads, self._ended = Lock(), list[Thread](), False
        self._newest: Path | None = None

    def offer(self, checkpoint: Path, best: Path | None) -> None:
        """Send this checkpoint with the files directly in the workspace and the folder `best`."""
        self._newest = checkpoint
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        thread = Thread(target=self._deliver, args=(checkpoint, best), name="checkpoint", daemon=True)
        self._threads.append(thread)
        thread.start()

    def end(self) -> None:
        """Stop sending, and wait for the transfer in progress."""
        self._ended = True
        self.join()

    def join(self) -> None:
        """Wait for all transfers in progress."""
        for thread in self._threads:
            thread.join()

    def _deliver(self, checkpoint: Path, best: Path | None) -> None:
        """Wait until a checkpoint is complete, then send it. It is not sent if a newer checkpoint is complete by
        then."""
        until = time.monotonic() + INCOMPLETE_S
        while not checkpoint.is_dir():
            if self._ended or time.monotonic() > until:
                return
            time.sleep(POLL_S)
        with self._guard:
            newest = self._newest
            if self._ended or (newest is not None and newest != checkpoint and newest.is_dir()):
                return
            try:
                self._before()
                with self._attempts.scratch() as scratch:
                    snapshot = scratch / "snapshot"
                    name = self._snapshot(checkpoint, best, snapshot)
                    self._attempts.send(self._workspace.name, self._attempt, snapshot, name)
            except (ArmatureError, OSError) as error:
                self._attempts.say(
                    f"warning: {checkpoint.name} was not sent to the remote store; the next one will be: {error}"
                )

    def _snapshot(self, checkpoint: Path, best: Path | None, folder: Path) -> str:
        """Collect the files to send in `folder`, since the trainer may delete old checkpoints and replace the best one.
        The checkpoint and the best weights are hard links; the other files of the workspace are copies. Return the
        checkpoint's path relative to the workspace."""
        name = checkpoint.resolve().relative_to(self._workspace).as_posix()
        link_folder(checkpoint, folder / name)
        if best is not None and best.is_dir():
            link_folder(best, folder / best.resolve().relative_to(self._workspace))
        for path in self._workspace.iterdir():
            if path.is_file() and not path.name.startswith("."):
                shutil.copyfile(path, folder / path.name)
        return name


def _steps(checkpoint: str) -> int:
    """Return the number of training steps that the name of a checkpoint's folder states, or -1 for a folder with
    another name."""
    matched = _STEP.fullmatch(checkpoint.rpartition("/")[2])
    return int(matched[1]) if matched else -1


def _damaged(where: str, why: object) -> DataError:
    return DataError(
        f"the remote copy of a checkpoint is damaged: {why}",
        code="remote_checkpoint_damaged",
        where=where,
        remedy="delete its folder in the remote store; training then starts from its stored batches",
    )
