"""The contract of stages, which flows, DVC and the command line can call: artifacts, events, context."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from contextvars import copy_context
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event, Thread
from typing import Any, Generic, Protocol, TypeVar

from pydantic import BaseModel, ConfigDict

from armature.components.contracts.machine import Machine


class Artifact(BaseModel):
    """A finished folder, with its kind, its path and the digest of its content.

    `digest` is equal to the digest that DVC writes to `dvc.lock` for the same folder.
    """

    model_config = ConfigDict(frozen=True)

    kind: str
    path: Path
    digest: str


TRAINING, ROLLOUTS = "Training", "rollouts"
"""Names of the progress of a training's steps and of the episodes of one step."""


class Events(Protocol):
    """Receiver of a stage's reports while it runs. Reports never change what the stage writes."""

    def progress(self, name: str, done: int, total: int, **postfix: float) -> None:
        """Report that `done` of `total` units of the progress bar `name` are done; `postfix` is shown beside the
        bar."""

    def metrics(self, values: Mapping[str, float], step: int) -> None:
        """Report the metrics of one step."""

    def artifact(self, artifact: Artifact, role: str, step: int | None = None) -> None:
        """Report a finished artifact, in the role "input" or "output"."""

    def message(self, text: str) -> None:
        """Write a line to the log."""


SAY_AFTER, SAY_EVERY = 10.0, 30.0
"""Seconds before the first message that says what a stage waits for, and between later ones."""


@contextmanager
def report_waiting(events: Events, waits_for: Callable[[], str]) -> Iterator[None]:
    """Within the block, write messages that say what the stage waits for and how long; none if the block is short."""
    began, ended = time.monotonic(), Event()

    def report() -> None:
        pause = SAY_AFTER
        while not ended.wait(pause):
            events.message(f"waiting for {waits_for()}, {time.monotonic() - began:.0f} s so far")
            pause = SAY_EVERY

    # In the caller's context, where Prefect finds the settings of its log.
    reporter = Thread(target=copy_context().run, args=(report,), name="waiting", daemon=True)
    reporter.start()
    try:
        yield
    finally:
        ended.set()
        reporter.join()


@dataclass(frozen=True)
class StageReport:
    """Facts about a stage's output: number of rows of each table, and number of dropped rows for each reason."""

    rows: Mapping[str, int] = field(default_factory=dict)
    drops: Mapping[str, int] = field(default_factory=dict)


SettingsT = TypeVar("SettingsT", bound=BaseModel)
ResultT = TypeVar("ResultT")


class Units(Protocol):
    """An executor for the named units of a long stage (collect, build, train, ...), which may run in parallel.

    By default units run on plain threads. A flow runs each unit as a task, so that units appear on the run's page.
    """

    def submit(self, name: str, unit: Callable[..., ResultT], *arguments: Any) -> Future[ResultT]:
        """Start `unit(*arguments)` under a name and return its future."""


class Saved(Protocol):
    """A function that is called with the folder of each checkpoint that a trainer saves.

    `best` is the folder of the best weights so far, or None.
    """

    def __call__(self, checkpoint: Path, best: Path | None = None) -> None: ...


def not_sent(checkpoint: Path, best: Path | None = None) -> None:
    """Do nothing. This is the default of `StageContext.saved`: checkpoints stay on this machine."""


@dataclass(frozen=True)
class StageContext:
    """Resources that a stage may use besides its settings and inputs; they do not change results.

    `workspace` is a folder that outlives a crash. Every attempt at the same stage with the same settings and inputs has
    the same one, so it holds the state to resume from. `images` is the root of the shared image store. `fingerprint`
    names the output in the artifact store. `saved` is called with each checkpoint that a trainer begins to write in the
    workspace, and with the folder of the best weights, if any, so that another machine can resume from it. `recipe` is
    the recipe's name for titles; "" if the stage does not run as part of a recipe.
    """

    machine: Machine
    events: Events
    units: Units
    workspace: Path
    images: Path
    fingerprint: str
    saved: Saved = not_sent
    recipe: str = ""


def nothing_more(settings: Any, inputs: Mapping[str, Artifact]) -> Mapping[str, str]:
    """Return an empty mapping, the default of `Stage.sources`.

    Most outputs depend only on the stage's version, settings and inputs.
    """
    return {}


def as_they_are(settings: SettingsT, inputs: Mapping[str, Artifact], say: Callable[[str], None]) -> SettingsT:
    """Return the settings unchanged, the default of `Stage.resolve`.

    It fits stages whose settings name no branch or tag, which could move to another commit.
    """
    return settings


def no_more_inputs(settings: Any) -> tuple[str, ...]:
    """Return no names, the default of `Stage.more_inputs`."""
    return ()


@dataclass(frozen=True)
class Stage(Generic[SettingsT]):
    """A function of validated settings and input artifacts that fills one output folder.

    `version` is raised whenever the same settings and inputs would give another output. `sources` returns the digests,
    by name, of everything else that the output depends on, such as the code of an environment. `resolve` returns the
    settings with the branches and tags of a hub replaced by commits, and reports each replacement. `more_inputs`
    returns the names of inputs that only some settings need; `inputs_for` returns all names. `versions` returns the
    versions of the packages and the hardware on which the output's bits depend; None: those of the model servers.
    """

    name: str
    version: int
    settings: type[SettingsT]
    inputs: tuple[str, ...]
    run: Callable[[SettingsT, Mapping[str, Artifact], Path, StageContext], StageReport]
    sources: Callable[[SettingsT, Mapping[str, Artifact]], Mapping[str, str]] = nothing_more
    resolve: Callable[[SettingsT, Mapping[str, Artifact], Callable[[str], None]], SettingsT] = as_they_are
    more_inputs: Callable[[SettingsT], tuple[str, ...]] = no_more_inputs
    versions: Callable[[Machine], dict[str, str]] | None = None

    def inputs_for(self, settings: SettingsT) -> tuple[str, ...]:
        """Return the names of the inputs that the stage takes with these settings."""
        return (*self.inputs, *self.more_inputs(settings))
