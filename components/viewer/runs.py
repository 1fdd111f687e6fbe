"""The runs of an artifact store that have rollouts to look at, finished or not."""

from __future__ import annotations

import glob
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from armature.components.artifacts.images import FORMATS
from armature.components.artifacts.json_lines import History
from armature.components.artifacts.manifest import MANIFEST
from armature.components.artifacts.tables import read_table
from armature.components.configuration.stages import STARTED
from armature.components.contracts.errors import DataError
from armature.components.contracts.files import regular
from armature.components.contracts.images import ImageRef
from armature.components.contracts.metrics import dump_json, read_floats
from armature.components.environments.stage import TASKS
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
"""The page counts no further."""


@dataclass(frozen=True)
class Run:
    """One attempt at a stage, named by its fingerprint.

    `inputs` are the folders of its input artifacts by name, empty for an artifact that was made elsewhere.
    """

    store: Path
    stage: str
    fingerprint: str
    settings: Mapping[str, Any]
    inputs: Mapping[str, Path]
    began: float
    finished: bool

    @property
    def artifact(self) -> Path:
        return self.store / self.stage / self.fingerprint

    @property
    def title(self) -> str:
        """What tells it apart: the environment and the model of a training, the splits of an evaluation."""
        settings = self.settings
        if self.stage == TRAINING:
            return f"{settings['environment']['name']}, {settings['model']['source']}"
        if self.stage == ROBOT_TRAINING:
            return str(settings["rollouts"]["suite"])
        if self.stage == ROBOT_EVALUATION:
            return " and ".join(settings["evaluation"]["suites"])
        return " and ".join(settings.get("evaluation", {}).get("splits", ())) or UNTITLED

    @property
    def steps(self) -> int | None:
        """How many steps a training will have made."""
        return self.settings["trainer"]["max_steps"] if self.stage in (TRAINING, ROBOT_TRAINING) else None

    @property
    def robot(self) -> bool:
        """Whether it is of a robot policy, which has episodes and videos in place of tokens."""
        return self.stage in (ROBOT_TRAINING, ROBOT_EVALUATION)

    @property
    def recorded(self) -> int:
        """The bytes of its history, which grows with every step."""
        with suppress(OSError):
            return (self.workspace / HISTORY).stat().st_size
        return 0

    def rollouts(self, source: str, step: int) -> Path:
        """Folder of the rollout tables of a step or of its held-out set; an evaluation has them in its artifact."""
        if self.stage == EVALUATION:
            return self.artifact
        return self.store / ("evaluations" if source == "heldout" else "rollouts") / f"{self.fingerprint}-{step:05d}"

    def robot_steps(self) -> dict[int, Path]:
        """The folders with the rollouts of a robot policy, by step."""
        folders = (self.store / "robot-rollouts").glob(f"{glob.escape(self.fingerprint)}-[0-9]*")
        numbers = {folder.name.rpartition("-")[2]: folder for folder in folders if folder.is_dir()}
        return {int(number): folder for number, folder in numbers.items() if number.isdecimal() and len(number) < 10}

    def batch(self, step: int) -> Path | None:
        """The folder with the samples of a step, if they are made; a batch that was skipped has none."""
        folder = self.store / "batches" / f"{self.fingerprint}-{step:05d}"
        skipped = folder.with_name(f"{folder.name}-skipped")
        return next((each for each in (skipped, folder) if each.is_dir()), None)

    @property
    def workspace(self) -> Path:
        """What its attempts keep; absent where the artifact was made elsewhere."""
        return self.store / "workspaces" / f"{self.stage}-{self.fingerprint}"

    def log_ratios(self, step: int) -> Path:
        """The file with the ratios of the tokens that step trained on, if it is made and was not lost."""
        return ratios_file(self.workspace, step)

    def history(self) -> list[dict[str, float]]:
        """The metrics of the steps that are done; of an artifact that was made elsewhere, its own record of them.

        Raises:
            DataError: the record cannot be read.
        """
        going = self.workspace / HISTORY
        made = self.artifact / "history.json"
        file = made if made.is_file() and not going.is_file() else going
        try:
            if file == made:
                return [read_floats(row) for row in json.loads(made.read_bytes())]
            return History(going).read() if going.is_file() else []
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise DataError(f"the metrics of the steps cannot be read: {error!s:.200}", where=str(file)) from error

    def tokenizer(self) -> Path | None:
        """A folder with the `tokenizer.json` of its policy, if there is one."""
        folders = [self.artifact / CHECKPOINT] if self.stage == TRAINING else []
        if "model" in self.inputs and self.inputs["model"].is_dir():
            with suppress(DataError):  # the checkpoint that it began with has changed since
                folders.append(locate(self.inputs["model"]))
        return next((folder for folder in folders if (folder / "tokenizer.json").is_file()), None)

    def tasks(self) -> Path | None:
        """The artifact with the tasks that it plays."""
        return self.inputs.get("tasks")


def find_runs(store: Path) -> list[Run]:
    """Every training and evaluation in `store`, the newest first; what cannot be read is left out."""
    found: dict[tuple[str, str], Run] = {}
    for stage in STAGES:
        for file in (store / "workspaces").glob(f"{stage}-*/{STARTED}"):
            if "-" not in (fingerprint := file.parent.name.removeprefix(f"{stage}-")):  # else of a longer stage's name
                _add(found, store, stage, fingerprint, file)
        for file in (store / stage).glob(f"*/{MANIFEST}"):
            if (stage, file.parent.name) not in found:
                _add(found, store, stage, file.parent.name, file)
    return sorted(found.values(), key=lambda run: -run.began)


def evaluations_of(run: Run, runs: Sequence[Run]) -> dict[str, str]:
    """The evaluations, by fingerprint, of the weights that a training made, and of those that it began with on the
    same tasks: "after training" and "before training"."""
    stages = {TRAINING: (EVALUATION, "model"), ROBOT_TRAINING: (ROBOT_EVALUATION, "policy")}
    if run.stage not in stages:
        return {}
    stage, weights = stages[run.stage]
    start, tasks = run.inputs.get(weights), run.inputs.get("tasks")
    found = {}
    for each in runs:
        model = each.inputs.get(weights) if each.stage == stage else None
        if model is not None and model.name == run.fingerprint:
            found[each.fingerprint] = "after training"
        elif model is not None and model == start and each.inputs.get("tasks") == tasks:
            found[each.fingerprint] = "before training"
    return found


def _add(found: dict[tuple[str, str], Run], store: Path, stage: str, fingerprint: str, file: Path) -> None:
    try:
        document = json.loads(regular(file).read_bytes())
        settings, inputs = document["settings"], document["inputs"] if file.name == STARTED else {}
        finished = (store / stage / fingerprint / MANIFEST).is_file()
        folders = {name: Path(folder) for name, folder in inputs.items()}
        run = Run(store, stage, fingerprint, settings, folders, file.stat().st_mtime, finished)
        dump_json([settings, run.title])  # fails for one that nests too deeply
        if run.steps is not None and not 0 <= run.steps <= MOST_STEPS:
            return
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return  # it is being replaced, is of another version, or cannot be shown
    found[stage, fingerprint] = run


# One group of rollouts in full: every token, image, reward and advantage, and the task that was played.

MEDIA = {media: name.lower() for media, name in FORMATS.items()}
"""The suffix of an image's address by its media type."""
_decoder = lru_cache(maxsize=8)(token_decoder)


def group_document(run: Run, source: str, step: int, group_id: str) -> dict[str, Any]:
    """As the page draws it: `trajectories`, `failures`, the text of their `tokens`, their `images`, and the `task`.

    Raises:
        DataError: its tables cannot be read, or have no such group.
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
    return {"trajectories": records, "failures": failures, "tokens": tokens, "images": images, "task": task}


def task_payload(tasks: Path | None, task_id: str) -> Any:
    """What the environment keeps of a task, its right answer among it; None where the tasks are not known.

    A payload that cannot be shown, such as one that nests too deeply, is replaced by the reason.
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
