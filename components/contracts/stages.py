"""The contract that every stage keeps, whoever calls it: a flow, DVC or a shell."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from pydantic import BaseModel, ConfigDict

from armature.components.contracts.machine import Machine


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


class Saved(Protocol):
    def __call__(self, checkpoint: Path, best: Path | None = None) -> None: ...


def not_sent(checkpoint: Path, best: Path | None = None) -> None:
    """Checkpoints stay on this machine."""


@dataclass(frozen=True)
class StageContext:
    """What a stage may use besides its settings and inputs; nothing in it changes results.

    `workspace` is a folder that outlives a crash, the same for every attempt at the same stage with the same
    settings and inputs: state to resume from lives there. `images` is the root of the shared image store.
    `fingerprint` names the output in the artifact store. `saved` is told of each checkpoint that a trainer begins to
    write in the workspace, and of the folder of the best weights, if any: another machine may resume from it.
    """

    machine: Machine
    events: Events
    units: Units
    workspace: Path
    images: Path
    fingerprint: str
    saved: Saved = not_sent


def nothing_more(settings: Any, inputs: Mapping[str, Artifact]) -> Mapping[str, str]:
    """What most stages depend on besides their version, settings and inputs."""
    return {}


def as_they_are(settings: SettingsT, inputs: Mapping[str, Artifact], say: Callable[[str], None]) -> SettingsT:
    """The settings of most stages: nothing in them stands for something that moves."""
    return settings


@dataclass(frozen=True)
class Stage(Generic[SettingsT]):
    """A function of validated settings and input artifacts that fills one output folder.

    `version` is raised whenever the same settings and inputs would give another output. `sources` gives the digests,
    by name, of what else the output depends on, such as the code of an environment. `resolve` gives the settings with
    commits in place of branches and tags of a hub, of which it says what they stand for.
    """

    name: str
    version: int
    settings: type[SettingsT]
    inputs: tuple[str, ...]
    run: Callable[[SettingsT, Mapping[str, Artifact], Path, StageContext], StageReport]
    sources: Callable[[SettingsT, Mapping[str, Artifact]], Mapping[str, str]] = nothing_more
    resolve: Callable[[SettingsT, Mapping[str, Artifact], Callable[[str], None]], SettingsT] = as_they_are
