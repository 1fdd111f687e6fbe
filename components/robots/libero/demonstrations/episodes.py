"""Episodes to demonstrate, a journal of finished episodes that survives a crash, and the report."""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from io import BytesIO
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from armature.components.artifacts.disk import write_file
from armature.components.contracts.errors import ConfigurationError
from armature.components.contracts.images import data_url
from armature.components.pages.report import HtmlReport, ReportImage, Table
from armature.components.robots.libero.processes import Demonstration
from armature.components.robots.libero.scripted.plans import SCRIPTED_SUITES, is_scripted
from armature.components.robots.libero.scripted.policy import DemonstrationOutcome
from armature.components.robots.libero.settings import DemonstrationSettings
from armature.components.robots.libero.tasks import LiberoTask, suite_tasks


@dataclass(frozen=True)
class DemonstrationJob:
    """Episode `number` of a task, to be demonstrated."""

    task: LiberoTask
    number: int
    initial_state: int
    seed: int

    @property
    def name(self) -> str:
        """Name of the episode's files."""
        return f"{self.task.suite}-{self.task.index:02d}-{self.number:05d}"


def jobs_of(settings: DemonstrationSettings) -> list[DemonstrationJob]:
    """Return all episodes in the dataset's order.

    Raises:
        ConfigurationError: the scripted policy does not support one of the tasks.
    """
    tasks = suite_tasks(settings.suite)
    able = [task.index for task in tasks if is_scripted(task)]
    chosen = settings.tasks or able
    if unable := sorted(set(chosen) - set(able)):
        raise ConfigurationError(
            f"the scripted policy does not support task {unable[0]} of {settings.suite}",
            code="task_not_scripted",
            where="demonstrations.tasks",
            remedy=f"choose among {able}" if able else f"choose a suite among {', '.join(SCRIPTED_SUITES)}",
        )
    if not chosen:
        raise ConfigurationError(
            f"the scripted policy does not support any task of {settings.suite}",
            code="task_not_scripted",
            where="demonstrations.suite",
            remedy=f"choose among {', '.join(SCRIPTED_SUITES)}",
        )
    return [_job(tasks[index], number, settings) for index in chosen for number in range(settings.episodes_per_task)]


class DemonstrationJournal:
    """Folder with one file per finished episode. Files are written atomically."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def has(self, job: DemonstrationJob) -> bool:
        """Return True if the episode is finished."""
        return self._path(job).is_file()

    def write(self, job: DemonstrationJob, demonstration: Demonstration) -> DemonstrationOutcome:
        """Write an episode's outcome, and its frames if it was successful. Return the outcome."""
        frames: dict[str, Any] = frames_of(demonstration) if demonstration.outcome.success else {}
        outcome = np.array(json.dumps(asdict(demonstration.outcome)))
        file = BytesIO()
        np.savez_compressed(file, allow_pickle=False, outcome=outcome, **frames)
        write_file(self._path(job), file.getvalue())
        return demonstration.outcome

    def outcome(self, job: DemonstrationJob) -> DemonstrationOutcome:
        """Read the outcome of an episode."""
        with np.load(self._path(job), allow_pickle=False) as arrays:
            return DemonstrationOutcome(**json.loads(str(arrays["outcome"])))

    def frames(self, job: DemonstrationJob) -> dict[str, NDArray[Any]]:
        """Read the frames of a successful episode, see `frames_of`."""
        with np.load(self._path(job), allow_pickle=False) as arrays:
            return {name: arrays[name] for name in arrays.files if name != "outcome"}

    def _path(self, job: DemonstrationJob) -> Path:
        return self._folder / f"{job.name}.npz"


def frames_of(demonstration: Demonstration) -> dict[str, NDArray[Any]]:
    """Return an episode's frames as features of a dataset, each (frames, *shape)."""
    seen = [observation for observation, _ in demonstration.steps]
    images: Mapping[str, Any] = {key: np.stack([each.images[key] for each in seen]) for key in seen[0].images}
    states = np.stack([each.state for each in seen])
    return {**images, "observation.state": states, "action": np.stack([action for _, action in demonstration.steps])}


def _job(task: LiberoTask, number: int, settings: DemonstrationSettings) -> DemonstrationJob:
    """Return an episode. Its seed depends on the episode only, not on the number of episodes or on other tasks."""
    text = f"{settings.seed} {task.suite} {task.index} {number}"
    seed = int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big")
    return DemonstrationJob(task, number, (settings.first_initial_state + number) % task.initial_states, seed)


STILLS, SIDE = 6, 128


@dataclass(frozen=True)
class Preview:
    """First episode of a task: images (frames, height, width, 3) of each camera, and the path of a video, if any."""

    title: str
    images: Sequence[NDArray[np.uint8]]
    film: str | None


def demonstrations_report(
    outcomes: Mapping[DemonstrationJob, DemonstrationOutcome], previews: Sequence[Preview], settings: dict[str, Any]
) -> HtmlReport:
    """Return the report: figures, a table by task, and images and videos of each task's first episode."""
    reached = [outcome for outcome in outcomes.values() if outcome.success]
    figures = {
        "episodes": f"{len(reached):,}",
        "goal not reached": f"{len(outcomes) - len(reached):,}",
        "frames": f"{sum(outcome.steps for outcome in reached):,}",
        "steps per episode": f"{fmean(outcome.steps for outcome in reached):.1f}",
    }
    columns = ["task", "episodes", "reached", "steps", "grasped again"]
    groups: dict[str, list[DemonstrationOutcome]] = {}
    for job, outcome in outcomes.items():
        groups.setdefault(f"{job.task.index}: {job.task.language}", []).append(outcome)
    table = Table("By task", columns, [_row(name, group) for name, group in groups.items()])
    links = {f"Video: {preview.title}": preview.film for preview in previews if preview.film}
    stills = [ReportImage(preview.title, _stills(preview), "from the first frame to the last") for preview in previews]
    return HtmlReport("Demonstrations", figures, links, stills, [table], settings)


def _row(name: str, outcomes: Sequence[DemonstrationOutcome]) -> list[str]:
    steps = [outcome.steps for outcome in outcomes if outcome.success]
    spread = f"{min(steps)} to {max(steps)}" if steps else ""
    again = sum(outcome.retries for outcome in outcomes)
    return [name, str(len(outcomes)), str(len(steps)), spread, str(again)]


def _stills(preview: Preview) -> str:
    """Return a JPEG with one row per camera, each with `STILLS` frames from the first to the last."""
    moments = np.linspace(0, len(preview.images[0]) - 1, STILLS).round().astype(int)
    sheet = Image.new("RGB", (SIDE * STILLS, SIDE * len(preview.images)))
    for row, images in enumerate(preview.images):
        for column, moment in enumerate(moments):
            still = Image.fromarray(images[moment]).resize((SIDE, SIDE), Image.Resampling.BILINEAR)
            sheet.paste(still, (SIDE * column, SIDE * row))
    out = io.BytesIO()
    sheet.save(out, "JPEG", quality=85)
    return data_url(out.getvalue(), "image/jpeg")
