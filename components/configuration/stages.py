"""The registry of stages, and `run_stage`, with which flows, DVC and the command line run them."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from tqdm import tqdm

from armature.components.artifacts.manifest import write_manifest
from armature.components.artifacts.store import ArtifactStore
from armature.components.configuration.trackers import TrackerRun, refuse_missing_trackers, with_trackers
from armature.components.contracts.digests import document_digest, refuse_non_finite
from armature.components.contracts.errors import ConfigurationError
from armature.components.contracts.installation import home_folder
from armature.components.contracts.machine import Machine
from armature.components.contracts.metrics import write_json
from armature.components.contracts.stages import (
    ROLLOUTS,
    TRAINING,
    Artifact,
    Events,
    ResultT,
    Stage,
    StageContext,
    Units,
)
from armature.components.machine.project import project_folder
from armature.components.machine.registry import Registry, suggestion
from armature.components.machine.versions import versions
from armature.components.machine.workers.worker import workers_on

STAGES = Registry(
    "stage",
    "armature.stages",
    {
        "alfworld-games": "armature.components.environments.alfworld.stage:GAMES_STAGE",
        "dataset": "armature.components.robots.datasets.source:DATASET_STAGE",
        "quantile-stats": "armature.components.robots.datasets.stage:QUANTILE_STATS_STAGE",
        "tasks": "armature.components.environments.stage:TASKS_STAGE",
        "model": "armature.components.models.stage:MODEL_STAGE",
        "warm-start": "armature.components.vlm.sft.warm_start:WARM_START_STAGE",
        "conversations": "armature.components.vlm.sft.conversations:CONVERSATIONS_STAGE",
        "sft": "armature.components.vlm.sft.supervised:SFT_STAGE",
        "train-vlm": "armature.components.rl.stage:TRAIN_VLM_STAGE",
        "evaluate": "armature.components.evaluation.stage:EVALUATE_STAGE",
        "demonstrations": "armature.components.robots.libero.demonstrations.stage:DEMONSTRATIONS_STAGE",
        "policy": "armature.components.robots.policies.stage:POLICY_STAGE",
        "train-vla": "armature.components.robots.imitation.stage:TRAIN_VLA_STAGE",
        "train-vla-rl": "armature.components.robots.rl.stage:TRAIN_VLA_RL_STAGE",
        "evaluate-libero": "armature.components.robots.evaluation.stage:EVALUATE_LIBERO_STAGE",
        "evaluate-benchmark": "armature.components.robots.served.stage:EVALUATE_BENCHMARK_STAGE",
        "compare-libero": "armature.components.robots.evaluation.stage:COMPARE_LIBERO_STAGE",
        "compare-policies": "armature.components.robots.evaluation.sweep:COMPARE_POLICIES_STAGE",
    },
)

STARTED = "stage.json"
"""File in a stage's workspace with its settings, its input folders, the recipe's name, the project folder, and the
versions that the stage runs with. They are empty if its attempts ran with several.

Viewers read it, also while the stage runs.
"""


class ProgressLines:
    """Turns progress into lines, for output that is not a terminal.

    Each training step is a line. Any other bar is a line at its beginning, every `SECONDS`, and at its end unless it is
    part of a training, whose next line follows. Rollouts have none at their beginning.
    """

    SECONDS = 15.0

    def __init__(self) -> None:
        self._shown_at: dict[str, float] = {}

    def line(self, name: str, done: int, total: int, postfix: Mapping[str, float]) -> str | None:
        """Return the line for this progress, or None if it needs no line."""
        now, ended = time.monotonic(), done >= total
        begins = name not in self._shown_at and not ended and name != ROLLOUTS
        late = now - self._shown_at.setdefault(name, now) > self.SECONDS
        shown = name == TRAINING or begins or late or (ended and TRAINING not in self._shown_at)
        if shown:
            self._shown_at[name] = now
        if ended:
            del self._shown_at[name]
        if not shown:
            return None
        return " ".join([f"{name} {done}/{total}", *(f"{key}={value:.4g}" for key, value in postfix.items())])


class TerminalEvents:
    """Events that appear as a progress bar and lines on the terminal.

    One bar stays: the bar of the training, or of a stage that does not train. Bars of rollouts disappear when they are
    full. If the standard error is not a terminal, there are lines instead of bars.
    """

    def __init__(self) -> None:
        self._bars: dict[str, tqdm[Any]] = {}
        self._lines = None if sys.stderr.isatty() else ProgressLines()

    def progress(self, name: str, done: int, total: int, **postfix: float) -> None:
        if self._lines is not None:
            if (line := self._lines.line(name, done, total, postfix)) is not None:
                tqdm.write(line, file=sys.stderr)
            return
        if name not in self._bars:
            stays = name != ROLLOUTS and not self._bars
            self._bars[name] = tqdm(total=total, desc=name, leave=stays, dynamic_ncols=True)
        bar = self._bars[name]
        if postfix:
            bar.set_postfix({key: f"{value:.4g}" for key, value in postfix.items()}, refresh=False)
        bar.update(done - bar.n)
        if done >= total:
            bar.close()
            del self._bars[name]

    def metrics(self, values: Mapping[str, float], step: int) -> None:
        """Do nothing: progress bars show the important numbers, and the history file has all of them."""

    def artifact(self, artifact: Artifact, role: str, step: int | None = None) -> None:
        """Do nothing: artifacts are listed when the stage ends."""

    def message(self, text: str) -> None:
        tqdm.write(text)

    def close(self) -> None:
        """Close all progress bars, so that the next output starts on a new line."""
        for bar in self._bars.values():
            bar.close()
        self._bars.clear()


class ThreadUnits:
    """An executor that runs the units of a stage on threads of this process."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(8, thread_name_prefix="unit")

    def submit(self, name: str, unit: Callable[..., ResultT], *arguments: Any) -> Future[ResultT]:
        return self._executor.submit(unit, *arguments)


def fingerprint(stage: Stage[Any], settings: BaseModel, inputs: Mapping[str, Artifact]) -> str:
    """Return the fingerprint that names a stage's output in the artifact store.

    It is a digest of the stage's name, version and sources, of its settings, and of its input artifacts.

    Raises:
        ConfigurationError: an input is missing or unexpected, or a setting is not finite.
    """
    return _fingerprint_and_sources(stage, settings, inputs)[0]


def _fingerprint_and_sources(
    stage: Stage[Any], settings: BaseModel, inputs: Mapping[str, Artifact]
) -> tuple[str, dict[str, str]]:
    """Return the fingerprint of a stage's output, and the digests, by name, of the stage's further sources."""
    if set(inputs) != set(stage.inputs_for(settings)):
        raise ConfigurationError(
            f"stage {stage.name!r} takes the inputs {sorted(stage.inputs_for(settings))}, given {sorted(inputs)}",
            code="stage_inputs_mismatch",
            remedy="name each input once: --input NAME=FOLDER",
        )
    refuse_non_finite(settings.model_dump())  # JSON would silently contain null instead
    document = {
        "stage": stage.name,
        "version": stage.version,
        "settings": settings.model_dump(mode="json"),
        "inputs": {name: inputs[name].digest for name in stage.inputs_for(settings)},
    }
    if sources := dict(stage.sources(settings, inputs)):
        document["sources"] = sources
    return document_digest(document)[:20], sources


def open_store(machine: Machine, say: Callable[[str], None] = tqdm.write) -> ArtifactStore:
    """Return the artifact store that the machine settings name; it reports transfers to `say`."""
    return ArtifactStore(home_folder() / machine.store, machine.remote_store, say)


def refuse_unknown(stages: Iterable[str]) -> None:
    """Check that all names in `stages` are names of stages.

    Raises:
        ConfigurationError: there is no such stage; the nearest one is suggested.
    """
    for name in stages:
        if name not in STAGES:
            raise ConfigurationError(
                f"no stage is called {name!r}",
                code="unknown_stage",
                where="machine.force, --force",
                remedy=suggestion(name, STAGES),
            )


def find_made(name: str, settings: BaseModel, inputs: Mapping[str, Artifact], machine: Machine) -> Artifact | None:
    """Return the artifact of stage `name` with these settings and inputs if the store has it, else None."""
    stage: Stage[Any] = STAGES[name]
    return open_store(machine).find(name, fingerprint(stage, settings, inputs))


def run_stage(
    name: str,
    settings: BaseModel,
    inputs: Mapping[str, Artifact],
    machine: Machine,
    events: Events | None = None,
    units: Units | None = None,
    again: bool = False,
    begins: Callable[[str], None] = lambda fingerprint: None,
    tracked_as: tuple[str, str] | None = None,
    recipe: str = "",
) -> Artifact:
    """Run stage `name`, or return its artifact if it was made before.

    If an earlier attempt was stopped, this attempt resumes from its workspace.

    Args:
        again: set an existing artifact aside and make it again from the beginning.
        begins: called with the fingerprint when this attempt holds the lock and is about to make the artifact.
        tracked_as: the project and the run's name in the trackers of `machine.report_to`.
        recipe: the recipe's name, for titles.
    """
    if events is None:
        with closing(TerminalEvents()) as terminal:
            return run_stage(name, settings, inputs, machine, terminal, units, again, begins, tracked_as, recipe)
    refuse_missing_trackers(machine.report_to)
    stage: Stage[Any] = STAGES[name]
    settings = stage.resolve(settings, inputs, events.message)
    store = open_store(machine, events.message)
    key, sources = _fingerprint_and_sources(stage, settings, inputs)
    with ExitStack() as held:
        held.enter_context(workers_on(machine.cluster))
        held.enter_context(store.lock(name, key))
        made = None if again else store.find(name, key)
        if made is not None:
            events.message(f"{name}: already made, {made.path}")
            store.send_waiting_or_warn()
            return made
        begins(key)
        if again:
            store.set_aside(name, key)
        held.callback(store.end_checkpoints, name, key)
        store.begin(name, key, afresh=again)
        workspace = store.workspace(name, key)
        project, label = tracked_as or ("armature", name)
        shown, folder = {"stage": name, "settings": settings.model_dump(mode="json")}, store.root.parent
        run = TrackerRun(project, label, key, shown, folder, workspace, store.images)
        context = StageContext(
            machine=machine,
            events=held.enter_context(with_trackers(events, machine.report_to, run)),
            units=units or ThreadUnits(),
            workspace=workspace,
            images=store.images,
            fingerprint=key,
            saved=partial(store.send_checkpoint, name, key),
            recipe=recipe,
        )
        folders = {name: str(inputs[name].path) for name in stage.inputs_for(settings)}
        recorded = _versions_of_attempts(workspace / STARTED, (stage.versions or versions)(machine))
        started_as = {"recipe": recipe, "project": str(project_folder().resolve()), "versions": recorded}
        write_json(workspace / STARTED, {"settings": settings.model_dump(), "inputs": folders, **started_as})

        def fill(folder: Path) -> None:
            report = stage.run(settings, inputs, folder, context)
            write_manifest(
                folder,
                kind=name,
                kind_version=stage.version,
                rows=dict(report.rows),
                drops=dict(report.drops),
                inputs={name: inputs[name].digest for name in stage.inputs_for(settings)},
                settings=settings.model_dump(mode="json"),
                sources=sources,
            )

        started = time.monotonic()
        store.write(name, key, fill)
        store.finish(name, key)
        artifact = store.find(name, key)
        assert artifact is not None
    events.message(f"{name}: made in {time.monotonic() - started:.1f} s, {artifact.path}")
    return artifact


def _versions_of_attempts(file: Path, here: dict[str, str]) -> dict[str, str]:
    """Return the versions with which all attempts of a stage run: `here`, or none if an earlier attempt had others.

    A file that a killed process has left incomplete may be of other versions, too.
    """
    if not file.exists():
        return here
    try:
        return here if json.loads(file.read_bytes())["versions"] == here else {}
    except (ValueError, KeyError):
        return {}
