"""The contract that every stage keeps, whoever calls it: a flow, DVC or a shell."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from pydantic import BaseModel, ConfigDict

from components.contracts.machine import Machine


class Artifact(BaseModel):
    """A finished folder: what kind it is, where it is, and the digest of its content.

    `digest` is the one that DVC writes to `dvc.lock` for the same folder.
    """

    model_config = ConfigDict(frozen=True)

    kind: str
    path: Path
    digest: str


class Events(Protocol):
    """Where a stage reports while it runs. None of it changes what the stage writes."""

    def progress(self, name: str, done: int, total: int, **postfix: float) -> None:
        """`done` of `total` units of the bar `name`; `postfix` is shown beside it."""

    def metrics(self, values: Mapping[str, float], step: int) -> None:
        """Numbers of one step."""

    def artifact(self, artifact: Artifact, role: str, step: int | None = None) -> None:
        """A finished artifact, as "input" or "output"."""

    def message(self, text: str) -> None:
        """A line for the log."""


@dataclass(frozen=True)
class StageReport:
    """What a stage says about its output: rows per table, and how many were dropped for which reason."""

    rows: Mapping[str, int] = field(default_factory=dict)
    drops: Mapping[str, int] = field(default_factory=dict)


SettingsT = TypeVar("SettingsT", bound=BaseModel)
ResultT = TypeVar("ResultT")


class Units(Protocol):
    """Runs the units of a long stage (collect, build, train ...), each under a name, perhaps at the same time.

    Plain threads by default; a flow runs each unit as a task of its own, so that it shows on the run's page.
    """

    def submit(self, name: str, unit: Callable[..., ResultT], *arguments: Any) -> Future[ResultT]: ...


@dataclass(frozen=True)
class StageContext:
    """What a stage may use besides its settings and inputs; nothing in it changes results.

    `workspace` is a folder that outlives a crash, the same for every attempt at the same stage with the same
    settings and inputs: state to resume from lives there. `images` is the root of the shared image store.
    `fingerprint` names the output in the artifact store.
    """

    machine: Machine
    events: Events
    units: Units
    workspace: Path
    images: Path
    fingerprint: str


def nothing_more(settings: Any, inputs: Mapping[str, Artifact]) -> Mapping[str, str]:
    """What most stages depend on besides their version, settings and inputs."""
    return {}


@dataclass(frozen=True)
class Stage(Generic[SettingsT]):
    """A function of validated settings and input artifacts that fills one output folder.

    `version` is raised whenever the same settings and inputs would give another output. `sources` gives the digests,
    by name, of what else the output depends on, such as the code of an environment.
    """

    name: str
    version: int
    settings: type[SettingsT]
    inputs: tuple[str, ...]
    run: Callable[[SettingsT, Mapping[str, Artifact], Path, StageContext], StageReport]
    sources: Callable[[SettingsT, Mapping[str, Artifact]], Mapping[str, str]] = nothing_more
