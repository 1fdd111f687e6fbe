"""How the processes of a training are started on each of its nodes, and what the nodes tell each other.

They speak over the workspace, which all of them see. The first node numbers the attempts, says where it can be reached
and how the last attempt ended. A node that reaches it takes a place in the attempt, and only who has one can end it: by
its connection (see `armature.components.training.links`), or by saying why it cannot continue.
"""

from __future__ import annotations

import shutil
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveInt

from armature.components.artifacts.disk import write_file
from armature.components.process import Program
from armature.components.training.links import Address, NodeLinks
from armature.components.training.processes import private_folder
from armature.components.training.service_settings import ServiceSettings

POLL = 0.5


def announce(settings: ServiceSettings, rendezvous: Path) -> None:
    """Add a training that begins to the list for nodes that wait in `rendezvous`."""
    rendezvous.mkdir(parents=True, exist_ok=True)
    number = 1 + sum(each.name.isdecimal() for each in rendezvous.iterdir())
    write_file(rendezvous / str(number), str(settings.file).encode())


def announced(rendezvous: Path) -> Iterator[Path]:
    """The file of each training as it begins, until `rendezvous` is removed."""
    number = 1
    while rendezvous.is_dir():
        if (entry := rendezvous / str(number)).exists():
            yield Path(entry.read_text())
            number += 1
        else:
            time.sleep(POLL)


class Attempt(BaseModel):
    """The newest start of the processes; `result` when there will be no other."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    number: PositiveInt
    address: Address | None = Field(None, description="Where other nodes connect to the first.")
    result: Literal["done", "failed"] | None = None

    @classmethod
    def newest(cls, workspace: Path) -> Attempt | None:
        try:
            return cls.model_validate_json(_file(workspace).read_text())
        except FileNotFoundError:
            return None

    @classmethod
    def following(cls, workspace: Path, address: Address | None = None) -> Attempt:
        """One more than the newest, not told yet."""
        newest = cls.newest(workspace)
        return cls(number=newest.number + 1 if newest else 1, address=address)

    def tell(self, workspace: Path) -> Attempt:
        """Make this the newest."""
        write_file(_file(workspace), self.model_dump_json().encode())
        return self

    def open(self, workspace: Path) -> Attempt:
        """Make the folder in which the processes meet, and then this the newest."""
        shutil.rmtree(workspace / f"attempt-{self.number - 2}", ignore_errors=True)
        private_folder(self.folder(workspace))
        return self.tell(workspace)

    def folder(self, workspace: Path) -> Path:
        return workspace / f"attempt-{self.number}"


class Member(BaseModel):
    """A node other than the first, as one of those of an attempt."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    number: PositiveInt = Field(description="Its place: 1, 2, ...; the first node has 0.")
    name: str
    address: Address = Field(description="Its end of the connection to the first node.")

    @classmethod
    def enter(cls, settings: ServiceSettings, attempt: Attempt, link: socket.socket) -> Member | None:
        """Take the next place that is free; None if there is none."""
        host, port = link.getsockname()[:2]
        for number in range(1, settings.processes.nodes):
            member = cls(number=number, name=socket.gethostname(), address=(host, port))
            place = attempt.folder(settings.workspace) / f"node-{number}"
            with suppress(FileExistsError), place.open("x") as file:
                file.write(member.model_dump_json())
                return member
        return None

    def give_up(self, settings: ServiceSettings, attempt: Attempt, reason: str) -> None:
        """Tell the first node why this one cannot continue."""
        with suppress(FileNotFoundError):  # an attempt that ended long ago
            _reason(attempt.folder(settings.workspace), self.number).write_text(reason)


@dataclass(frozen=True)
class LostNode:
    """Its place, and who it was and why it is lost."""

    number: int
    reason: str


def members(settings: ServiceSettings, attempt: Attempt) -> list[Member]:
    """The other nodes that take part in `attempt`."""
    found = []
    for file in sorted(attempt.folder(settings.workspace).glob("node-*")):
        with suppress(ValueError):  # not all of it is there yet
            found.append(Member.model_validate_json(file.read_text()))
    return found


def lost_node(settings: ServiceSettings, attempt: Attempt, links: NodeLinks) -> LostNode | None:
    """The first member of `attempt` that is gone or gave up; None while there is none."""
    for member in members(settings, attempt):
        gone = links.broken(member.address)
        with suppress(FileNotFoundError):
            gone = _reason(attempt.folder(settings.workspace), member.number).read_text()
        if gone is not None:
            return LostNode(member.number, f"node {member.name} ({member.address[0]}): {gone}")
    return None


def start(settings: ServiceSettings, attempt: Attempt, node: int, log: Path | None, **env: str) -> Program:
    """The processes of `attempt` on node 0 (the first), 1, ...

    Raises:
        ConfigurationError: this node has no such network interface, or a variable that `environment` names is not set.
    """
    return settings.processes.start(
        ["-m", "armature.components.training.service", settings.file],
        rendezvous=attempt.folder(settings.workspace),
        node=node,
        log=log,
        env=env,
    )


def _file(workspace: Path) -> Path:
    return workspace / "attempt.json"


def _reason(folder: Path, number: int) -> Path:
    return folder / f"lost-{number}"
