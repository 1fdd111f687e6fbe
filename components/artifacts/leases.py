"""Which machine makes an artifact, among those that share a remote store.

`leases/<stage>-<fingerprint>/<number>` names a holder. It is written only where there is none yet, and the highest
number counts. A holder writes its own again and again: who sees no change for `LEASE` seconds takes the next number.
No clocks are compared. A number is never free again: its file stays, marked as released, until `armature store gc`.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from threading import Event, Thread
from uuid import uuid4

from pydantic import BaseModel, ConfigDict, ValidationError

from armature.components.artifacts.cache import make_once
from armature.components.artifacts.remote_folder import RemoteFolder
from armature.components.contracts.errors import StoreError

LEASES = "leases"
LEASE = 90.0
"""Seconds without a sign of life after which a machine counts as gone; longer than a store is usually away."""
RENEWAL = 15.0
POLL = 5.0


class Holder(BaseModel):
    """`store` names a local store: who has its lock knows that an earlier holder of the same store is gone."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    store: str
    host: str
    pid: int
    since: str
    renewed: int = 0
    released: bool = False

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host} since {self.since}"


class RemoteLeases:
    """
    Args:
        files: of the remote store.
        store: a file that names the local store, made if it is not there.
        say: is told what is waited for.

    Raises:
        StoreError: of every method: see `RemoteFolder`.
    """

    def __init__(self, files: RemoteFolder, store: Path, say: Callable[[str], None]) -> None:
        self._files, self._store, self._say = files, store, say
        self._exclusive: bool | None = None
        self._lost: dict[str, Holder] = {}

    @contextmanager
    def held(self, name: str) -> Iterator[None]:
        """Held by one machine at a time: others wait, and say for whom. The caller has the lock of the local store."""
        number, mine = self._acquire(name)
        ended = Event()
        thread = Thread(target=self._renew, args=(name, number, mine, ended), name=f"lease of {name}", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()
            if self._lost.pop(name, None) is None:
                self._write(name, number, mine.model_copy(update={"released": True}))

    def refuse_lost(self, name: str) -> None:
        """
        Raises:
            StoreError: another machine has it now.
        """
        if name in self._lost:
            raise StoreError(
                f"another machine has taken this over: {self._lost[name]}",
                code="stage_taken_over",
                where=f"{self._files.url}/{LEASES}/{name}",
                remedy="let that one finish: it has gone on from the last checkpoint that was copied. This machine did "
                f"not reach the remote store for {LEASE:.0f} s, or was suspended",
            )

    def _acquire(self, name: str) -> tuple[int, Holder]:
        mine = Holder(
            store=make_once(self._store, _write_id).read_text(),
            host=socket.gethostname(),
            pid=os.getpid(),
            since=datetime.now(UTC).isoformat(timespec="seconds"),
        )
        while True:
            number = self._free_number(name, mine)
            if self._create(name, number, mine):
                return number, mine

    def _free_number(self, name: str, mine: Holder) -> int:
        """The number to take, as soon as nobody has the one before."""
        seen, unchanged_since, asked = None, 0.0, 0.0
        waiting = False
        while True:
            newest = max(self._numbers(name), default=0)
            found = self._read(name, newest) if newest else None
            if not newest or (found is not None and (found.released or found.store == mine.store)):
                return newest + 1
            now = time.monotonic()
            if (newest, found) != seen or now - asked > LEASE / 2:  # the store was away for the holder, too
                seen, unchanged_since = (newest, found), now
            if now - unchanged_since > LEASE:
                self._say(f"{found or 'another machine'} is gone, taken over ({name})")
                return newest + 1
            if not waiting:
                waiting = True
                self._say(f"waits for {found or 'another machine'}, which makes the same artifact ({name})")
            asked = now
            time.sleep(POLL)

    def _create(self, name: str, number: int, mine: Holder) -> bool:
        content = mine.model_dump_json().encode()
        created = self._files.create(_path(name, number), content) or self._read(name, number) == mine
        if created and self._exclusive is None:
            self._exclusive = self._files.conditional and not self._files.create(_path(name, number), content)
            if not self._exclusive:
                self._say(
                    f"the remote store {self._files.url} has no conditional writes: two machines that start the same "
                    "run at the same moment may both do the work"
                )
        return created

    def _renew(self, name: str, number: int, mine: Holder, ended: Event) -> None:
        while not ended.wait(RENEWAL):
            with suppress(StoreError):  # the next attempt may come in time; else another machine says so here
                newest = max(self._numbers(name), default=number)
                if newest > number:
                    self._lost[name] = self._read(name, newest) or mine
                    self._say(f"{self._lost[name]} has taken over what this machine makes ({name})")
                    return
                mine = mine.model_copy(update={"renewed": mine.renewed + 1})
                self._write(name, number, mine)

    def _numbers(self, name: str) -> list[int]:
        return [int(each) for each in self._files.listed(f"{LEASES}/{name}") if each.isdecimal()]

    def _read(self, name: str, number: int) -> Holder | None:
        """None where it is just being written or replaced."""
        try:
            return Holder.model_validate_json(self._files.read_if_there(_path(name, number)) or b"")
        except ValidationError:
            return None

    def _write(self, name: str, number: int, holder: Holder) -> None:
        self._files.write(_path(name, number), holder.model_dump_json().encode())


def _write_id(path: Path) -> None:
    path.write_text(uuid4().hex)


def _path(name: str, number: int) -> str:
    return f"{LEASES}/{name}/{number:06d}"
