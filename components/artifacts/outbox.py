"""What a remote store still lacks, in the order in which it was made. It is on the disk and survives the process."""

from __future__ import annotations

import fcntl
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Lock, Thread

from pydantic import BaseModel, ConfigDict, ValidationError

from armature.components.artifacts.disk import write_file

AGAIN = 30.0
"""Seconds after which what could not be sent is tried again."""
POLL = 0.5
SCRATCH = "scratch"
"""A folder beside the entries for what is being sent, which its user makes."""


class Entry(BaseModel):
    """An artifact, or with `checkpoint` (relpath, in a workspace) the newest one of a stage that is not finished."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    number: int
    stage: str
    fingerprint: str
    checkpoint: str | None = None
    more: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return f"{self.stage}-{self.fingerprint}" + ".checkpoint" * (self.checkpoint is not None) + ".json"


class Outbox:
    """A thread sends while there is something to send; one process does at a time.

    Args:
        send: sends an entry, or answers False where it is not complete yet.
    """

    def __init__(self, folder: Path, send: Callable[[Entry], bool], say: Callable[[str], None]) -> None:
        self._folder, self._send, self._say = folder, send, say
        self._guard, self._wake = Lock(), Event()
        self._thread: Thread | None = None
        self._said = ""

    def add(self, stage: str, fingerprint: str, checkpoint: str | None = None, more: tuple[str, ...] = ()) -> None:
        """A checkpoint takes the place of the one that was to be sent before."""
        number = time.time_ns()
        entry = Entry(number=number, stage=stage, fingerprint=fingerprint, checkpoint=checkpoint, more=more)
        path = self._folder / entry.name
        if checkpoint is not None or not path.exists():
            self._folder.mkdir(parents=True, exist_ok=True)
            write_file(path, entry.model_dump_json().encode())
        self.start()

    def forget_checkpoint(self, stage: str, fingerprint: str) -> None:
        entry = Entry(number=0, stage=stage, fingerprint=fingerprint, checkpoint="")
        (self._folder / entry.name).unlink(missing_ok=True)

    def start(self) -> None:
        """Send what is there, in the background."""
        with self._guard:
            self._wake.set()
            if self._thread is None and self._entries():
                self._thread = Thread(target=self._work, name="outbox", daemon=True)
                self._thread.start()

    def settle(self) -> None:
        """Wait until all that is complete is sent.

        Raises:
            StoreError: the remote store does not take it; it stays here.
        """
        self._pass()

    def _work(self) -> None:
        while True:
            self._wake.clear()
            try:
                self._pass()
                wait = POLL
            except Exception as error:  # `settle` raises it
                wait = AGAIN
                if str(error) != self._said:
                    self._said = str(error)
                    self._say(f"not copied to the remote store yet, which is tried again: {error}")
            with self._guard:
                if not self._entries():
                    self._thread = None
                    return
            self._wake.wait(wait)

    def _pass(self) -> None:
        with self.held():
            for entry in self._entries():
                path = self._folder / entry.name
                before = _content(path)
                if before and self._send(entry) and _content(path) == before:
                    path.unlink(missing_ok=True)

    def _entries(self) -> list[Entry]:
        entries = []
        for path in self._folder.glob("*.json"):
            try:
                entries.append(Entry.model_validate_json(_content(path)))
            except ValidationError:
                path.unlink(missing_ok=True)  # of another version: what it names is sent when it is used
        return sorted(entries, key=lambda entry: entry.number)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Within, nothing is sent. What a killed process left in the folder `SCRATCH` is removed."""
        self._folder.mkdir(parents=True, exist_ok=True)
        with (self._folder / ".lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            shutil.rmtree(self._folder / SCRATCH, ignore_errors=True)
            yield


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return b""
