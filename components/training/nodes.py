"""How the processes of a training are started on each of its nodes, and what the first node tells the others.

They speak over the workspace, which all of them see. The first node numbers the attempts and says how the last one
ended; another node says when it lost the attempt in progress. So an attempt that ends on one ends on all, also
where a process would wait for ever for one that died elsewhere.
"""

from __future__ import annotations

import os
import shutil
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, PositiveInt

from components.artifacts.disk import write_file
from components.process import Program
from components.training.processes import private_folder
from components.training.service_settings import ServiceSettings

SILENCE = 120.0
"""Seconds after which a node without a sign of life is lost."""


class Attempt(BaseModel):
    """The newest start of the processes; `result` when there will be no other."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    number: PositiveInt
    result: Literal["done", "failed"] | None = None

    @classmethod
    def newest(cls, workspace: Path) -> Attempt | None:
        try:
            return cls.model_validate_json(_file(workspace).read_text())
        except FileNotFoundError:
            return None

    @classmethod
    def following(cls, workspace: Path) -> Attempt:
        """One more than the newest, not told yet."""
        newest = cls.newest(workspace)
        return cls(number=newest.number + 1 if newest else 1)

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

    def lost(self, workspace: Path) -> Path:
        """Is there when a node other than the first could not go on; says which and why."""
        return workspace / f"lost-{self.number}"


@dataclass(frozen=True)
class NodeRank:
    """A node's place among those of an attempt, 1, 2, ...; the first node has 0."""

    number: int
    sign: Path

    @classmethod
    def take(cls, settings: ServiceSettings, attempt: Attempt) -> NodeRank | None:
        """The next that is free; None if there is none."""
        for number in range(1, settings.processes.nodes):
            place = cls(number, attempt.folder(settings.workspace) / f"node-{number}")
            with suppress(FileExistsError):
                place.sign.touch(exist_ok=False)
                return place
        return None

    def live(self) -> None:
        """Say that this node is still there."""
        with suppress(FileNotFoundError):  # that of an attempt that ended long ago
            os.utime(self.sign)


class NodeHeartbeats:
    """What the first node sees of the others: a sign of life of each that came, in files, by no clock but its own."""

    def __init__(self, settings: ServiceSettings, attempt: Attempt) -> None:
        self._folder, self._lost = attempt.folder(settings.workspace), attempt.lost(settings.workspace)
        self._seen: dict[str, tuple[int, float]] = {}

    def lost(self) -> str | None:
        """Which node is lost and why; None while there is none."""
        if self._lost.exists():
            return self._lost.read_text()
        now = time.monotonic()
        for sign in self._folder.glob("node-*"):
            changed, since = self._seen.get(sign.name, (0, now))
            latest = sign.stat().st_mtime_ns
            if latest != changed:
                self._seen[sign.name] = latest, now
            elif now > since + SILENCE:
                return f"{sign.name} has given no sign of life for {SILENCE:g} s"
        return None


def start(settings: ServiceSettings, attempt: Attempt, node: int, log: Path | None, **env: str) -> Program:
    """The processes of `attempt` on node 0 (the first), 1, ...

    Raises:
        ConfigurationError: this node has no such network interface, or a variable that `environment` names is not set.
    """
    return settings.processes.start(
        ["-m", "components.training.service", settings.file],
        rendezvous=attempt.folder(settings.workspace),
        node=node,
        log=log,
        env=env,
    )


def _file(workspace: Path) -> Path:
    return workspace / "attempt.json"
