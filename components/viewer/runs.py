"""Find the trainings and evaluations of an artifact store, finished or running, and read one group of their
rollouts."""

from __future__ import annotations

import glob
import json
import threading
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

from armature.components.artifacts.images import FORMATS
from armature.components.artifacts.json_lines import History
from armature.components.artifacts.manifest import MANIFEST
from armature.components.artifacts.tables import read_table
from armature.components.configuration.stages import STARTED
from armature.components.contracts.episodes import DemonstrationEnvironment, Task
from armature.components.contracts.errors import ArmatureError, DataError
from armature.components.contracts.files import regular
from armature.components.contracts.images import ImageRef
from armature.components.contracts.metrics import dump_json, read_floats
from armature.components.environments.make import make_environment
from armature.components.environments.settings import EnvironmentSettings
from armature.components.environments.stage import ENVIRONMENT, TASKS
from armature.components.machine.project import project
from armature.components.models.source import CHECKPOINT, locate
from armature.components.pages.records import rollout_record, token_decoder
from armature.components.rollouts.batches.ratios import ratios_file, read_scores
from armature.components.rollouts.table import read_rollouts

TRAINING, EVALUATION = "train-vlm", "evaluate"
ROBOT_TRAINING, ROBOT_EVALUATION = "train-vla-rl", "evaluate-libero"
STAGES = (TRAINING, EVALUATION, ROBOT_TRAINING, ROBOT_EVALUATION)
UNTITLED = "?"
HISTORY = "history.jsonl"
MOST_STEPS = 2**53
"""Largest number of steps of a run that the viewer shows. JavaScript cannot represent every larger integer."""


@dataclass(frozen=True)
class Run:
    """A training or an evaluation in the store. Its name is the fingerprint of its artifact."""

    store: Path
    stage: str
    fingerprint: str
    settings: Mapping[str, Any]
    inputs: Mapping[str, Path]
    """Folders of the input artifacts by name; empty for an artifact that another machine made."""
    began: float
    """Time of the start, in seconds since 1970."""
    finished: bool
    recipe: str = ""
    """Name of the recipe that started the run; "" if it is not known."""
    project: str = ""
    """Folder of the recipe, to which relative paths of the settings refer; "" if it is not known."""

    @property
    def artifact(self) -> Path:
        """Folder of the artifact, which exists once the run is finished."""
        return self.store / self.stage / self.fingerprint

    @property
    def title(self) -> str:
        """Title of the run in the list of runs: the recipe's name. If it is not known: environment and model of a
        training, splits of an evaluation, or suites of a robot policy's run."""
        settings = self.settings
        if self.recipe:
            return self.recipe
        if self.stage == TRAINING:
            return f"{settings['environment']['name']}, {settings['model']['source']}"
        if self.stage == ROBOT_TRAINING:
            return str(settings["rollouts"]["suite"])
        if self.stage == ROBOT_EVALUATION:
            return " and ".join(settings["evaluation"]["suites"])
        return " and ".join(settings.get("evaluation", {}).get("splits", ())) or UNTITLED

    @property
    def steps(self) -> int | None:
        """Number of steps that a training is configured to make; None for an evaluation."""
        return self.settings["trainer"]["max_steps"] if self.stage in (TRAINING, ROBOT_TRAINING) else None

    @property
    def robot(self) -> bool:
        """True for a run of a robot policy, which has episodes and videos instead of tokens."""
        return self.stage in (ROBOT_TRAINING, ROBOT_EVALUATION)

    @property
    def recorded(self) -> int:
        """Size in bytes of the run's history, which grows with every step."""
        with suppress(OSError):
            return (self.workspace / HISTORY).stat().st_size
        return 0

    def rollouts(self, source: str, step: int) -> Path:
        """Return the folder with the rollout tables of `step`. For an evaluation, this is its artifact.

        `source` is "train" for the rollouts that the step trained on, or "heldout" for its held-out set.
        """
        if self.stage == EVALUATION:
            return self.artifact
        return self.store / ("evaluations" if source == "heldout" else "rollouts") / f"{self.fingerprint}-{step:05d}"

    def robot_steps(self) -> dict[int, Path]:
        """Return the folders with the rollouts of a robot policy's training, by step."""
        folders = (self.store / "robot-rollouts").glob(f"{glob.escape(self.fingerprint)}-[0-9]*")
        numbers = {folder.name.rpartition("-")[2]: folder for folder in folders if folder.is_dir()}
        return {int(number): folder for number, folder in numbers.items() if number.isdecimal() and len(number) < 10}

    def batch(self, step: int) -> Path | None:
        """Return the folder with the training samples of a step, or None if there is no such folder. If the step's
        batch was skipped, the folder has no samples."""
        folder = self.store / "batches" / f"{self.fingerprint}-{step:05d}"
        skipped = folder.with_name(f"{folder.name}-skipped")
        return next((each for each in (skipped, folder) if each.is_dir()), None)

    @property
    def workspace(self) -> Path:
        """Folder with checkpoints and history of the run; it does not exist if another machine made the artifact."""
        return self.store / "workspaces" / f"{self.stage}-{self.fingerprint}"

    def log_ratios(self, step: int) -> Path:
        """Return the path of the table with the log-ratios of a step's trained tokens. The file may be missing."""
        return ratios_file(self.workspace, step)

    def history(self) -> list[dict[str, float]]:
        """Read the metrics of the finished steps from the workspace, or else from the artifact.

        Raises:
            DataError: the file cannot be read.
        """
        running = self.workspace / HISTORY
        final = self.artifact / "history.json"
        file = final if final.is_file() and not running.is_file() else running
        try:
            if file == final:
                return [read_floats(row) for row in json.loads(final.read_bytes())]
            return History(running).read() if running.is_file() else []
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise DataError(f"the metrics of the steps cannot be read: {error!s:.200}", where=str(file)) from error

    def accuracy(self) -> float | None:
        """Return the accuracy of a finished evaluation; None for other runs, or if it cannot be read."""
        if self.stage != EVALUATION or not self.finished:
            return None
        with suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
            document = json.loads(regular(self.artifact / "metrics.json").read_bytes())
            return read_floats({"accuracy": document["accuracy"]})["accuracy"]
        return None

    def tokenizer(self) -> Path | None:
        """Return a folder with the `tokenizer.json` of the run's model, or None if there is no such folder."""
        folders = [self.artifact / CHECKPOINT] if self.stage == TRAINING else []
        if "model" in self.inputs and self.inputs["model"].is_dir():
            with suppress(DataError):  # the checkpoint that the run began with has changed since
                folders.append(locate(self.inputs["model"]))
        return next((folder for folder in folders if (folder / "tokenizer.json").is_file()), None)

    def tasks(self) -> Path | None:
        """Return the folder of the artifact with the run's tasks, or None if it is not known."""
        return self.inputs.get("tasks")


def find_runs(store: Path, fingerprint: str = "*") -> list[Run]:
    """Return all trainings and evaluations in `store`, newest first. Runs that cannot be read are left out.

    With a `fingerprint` of letters and digits, only the runs of that name are looked up, without listing the store.
    """
    runs: dict[tuple[str, str], Run] = {}
    wanted = fingerprint if fingerprint.isalnum() and len(fingerprint) <= 64 else "*"
    for stage in STAGES:
        for file in (store / "workspaces").glob(f"{stage}-{wanted}/{STARTED}"):
            fingerprint = file.parent.name.removeprefix(f"{stage}-")
            if "-" not in fingerprint:  # "evaluate-*" also matches the workspaces of "evaluate-libero"
                _add(runs, store, stage, fingerprint, file)
        for file in (store / stage).glob(f"{wanted}/{MANIFEST}"):
            if (stage, file.parent.name) not in runs:
                _add(runs, store, stage, file.parent.name, file)
    return sorted(runs.values(), key=lambda run: -run.began)


_EVALUATED = {TRAINING: (EVALUATION, "model"), ROBOT_TRAINING: (ROBOT_EVALUATION, "policy")}
"""For each stage that trains: the stage that evaluates its weights, and the name of that stage's input with them."""


def evaluations_of(runs: Sequence[Run]) -> dict[str, dict[str, str]]:
    """Return the evaluations of each training in `runs`, by fingerprints. The values are "before training" or "after
    training".

    An evaluation belongs to a training if it evaluated the trained weights. It also belongs to it if it evaluated, on
    the same tasks, the weights that the training began with.
    """
    after: dict[tuple[str, str], list[Run]] = defaultdict(list)
    before: dict[tuple[str, Path, Path | None], list[Run]] = defaultdict(list)
    for each in runs:
        for stage, weights in _EVALUATED.values():
            if each.stage == stage and (model := each.inputs.get(weights)) is not None:
                after[stage, model.name].append(each)
                before[stage, model, each.inputs.get("tasks")].append(each)
    evaluations = {}
    for run in runs:
        if run.stage in _EVALUATED:
            stage, weights = _EVALUATED[run.stage]
            start = run.inputs.get(weights)
            begun = before.get((stage, start, run.inputs.get("tasks")), []) if start else []
            ended = after.get((stage, run.fingerprint), [])
            evaluations[run.fingerprint] = {each.fingerprint: "before training" for each in begun} | {
                each.fingerprint: "after training" for each in ended
            }
    return evaluations


def _add(runs: dict[tuple[str, str], Run], store: Path, stage: str, fingerprint: str, file: Path) -> None:
    with suppress(OSError):
        state = file.stat()
        if run := _read_run(store, stage, fingerprint, file, state.st_ino, state.st_mtime):
            runs[stage, fingerprint] = replace(run, finished=(store / stage / fingerprint / MANIFEST).is_file())


@lru_cache(maxsize=4096)
def _read_run(store: Path, stage: str, fingerprint: str, file: Path, inode: int, began: float) -> Run | None:
    """Read a run's document, or return None if it cannot be read or shown. `inode` and `began` are part of the cache
    key, so that a new file is read again."""
    try:
        document = json.loads(regular(file).read_bytes())
        settings, inputs = document["settings"], document["inputs"] if file.name == STARTED else {}
        folders = {name: Path(folder) for name, folder in inputs.items()}
        started = [str(document.get(key, "")) for key in ("recipe", "project")] if file.name == STARTED else ()
        run = Run(store, stage, fingerprint, settings, folders, began, False, *started)
        dump_json([settings, run.title])  # raises RecursionError if the settings nest too deeply to be shown
        return run if run.steps is None or 0 <= run.steps <= MOST_STEPS else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None  # the file is being replaced, was written by another version, or cannot be shown


# --- One group of rollouts in full ---

MEDIA = {media: name.lower() for media, name in FORMATS.items()}
"""File name suffix in an image's address, by the image's media type."""
_decoder = lru_cache(maxsize=8)(token_decoder)


def group_document(run: Run, source: str, step: int, group_id: str) -> dict[str, Any]:
    """Return a group of rollouts as a JSON document for the page.

    It has the `trajectories` with every token, image, reward and advantage, the `failures`, the text of each token id
    in `tokens`, the addresses and sizes of the `images`, the payload of the `task`, and its right `answer`.

    Raises:
        DataError: the tables cannot be read or have no such group.
    """
    played = run.rollouts(source, step)
    outputs = read_rollouts(played, group_id)
    if not outputs.trajectories and not outputs.failures:
        raise DataError(f"there is no group {group_id!r} in step {step}", where=str(played))
    batch = run.batch(step) if source == "train" else None
    scores = read_scores(outputs.trajectories, batch, run.log_ratios(step), group_id) if batch is not None else {}
    tokens: dict[str, str] = {}
    images: dict[str, dict[str, Any]] = {}
    folder = run.tokenizer()

    def piece(token: int) -> str:
        if str(token) not in tokens:
            tokens[str(token)] = _decoder(folder)(token) if folder is not None else f"[{token}]"
        return tokens[str(token)]

    def image_key(ref: ImageRef) -> str:
        uri = f"/images/{ref.sha256}.{MEDIA[ref.media_type]}"
        images[ref.sha256] = {"uri": uri, "width": ref.width, "height": ref.height}
        return ref.sha256

    records = [
        rollout_record(each, step, scores.get(each.trajectory_id, ()), image_key, piece)
        for each in outputs.trajectories
    ]
    task_id = outputs.trajectories[0].task_id if outputs.trajectories else outputs.failures[0].task_id
    failures = [{"id": each.trajectory_id, "reason": each.reason, "detail": each.detail} for each in outputs.failures]
    task = task_payload(run.tasks(), task_id)
    shown = {"trajectories": records, "failures": failures, "tokens": tokens, "images": images}
    return {**shown, "task": task, "answer": right_answer(run, task_id, task)}


ANSWERING = ("colors", "coordinates", "dataset", "motion", "recall")
"""Environments that the viewer asks for the right answer. They run no code of a user and start no server."""
_one_project = threading.Lock()


@lru_cache(maxsize=4)
def _environment(document: str, folder: str) -> DemonstrationEnvironment:
    """Make the environment that a tasks artifact describes, for a recipe in `folder`.

    A dataset gets no rewards of the recipe, because they may be functions of a user.
    """
    values = json.loads(document)
    if values["name"] == "dataset":
        values["args"]["rewards"] = [{"name": "exact_match"}]
    return cast(DemonstrationEnvironment, make_environment(EnvironmentSettings.model_validate(values), processes=1))


def right_answer(run: Run, task_id: str, payload: Any) -> str | None:
    """Return the right answer to a task, for example the answer in the row of a table.

    Return None if the run's environment is not in `ANSWERING`, or the task has no single right answer. If the data
    cannot be read any more, the reason is returned instead.
    """
    tasks = run.tasks()
    if tasks is None or not (tasks / ENVIRONMENT).is_file() or not isinstance(payload, dict):
        return None
    try:
        document = regular(tasks / ENVIRONMENT).read_text()
        if json.loads(document)["name"] not in ANSWERING:
            return None
        with _one_project, project(Path(run.project)):
            environment = _environment(document, run.project)
            return "\n".join(environment.demonstration(Task(task_id, "train", payload))) or None
    except (ArmatureError, OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        return f"unknown: {error!s:.200}"


def task_payload(tasks: Path | None, task_id: str) -> Any:
    """Return the payload of a task, which usually has the right answer. Return None if `tasks`, the folder of the tasks
    artifact, is None or lacks the task.

    If the payload cannot be shown, for example because it nests too deeply, the reason is returned instead.
    """
    if tasks is None:
        return None
    for table in sorted(tasks.glob("*.parquet")):
        if rows := read_table(table, TASKS, {"task_id": task_id}).to_pylist():
            try:
                payload = json.loads(rows[0]["payload"])
                dump_json(payload)
                return payload
            except (ValueError, RecursionError) as error:
                return f"the task cannot be shown: {error}"
    return None
