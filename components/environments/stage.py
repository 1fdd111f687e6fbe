"""The stage `tasks`, which writes an environment's tasks as an artifact, and functions that read that artifact."""

from __future__ import annotations

import asyncio
import json
import textwrap
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing, suppress
from itertools import islice
from pathlib import Path

import pyarrow as pa
from PIL import Image, ImageDraw, ImageFont
from pydantic import ValidationError

from armature.components.artifacts.images import decode
from armature.components.artifacts.tables import TableSchema, read_table, write_table
from armature.components.contracts.checks import MOST_CHARACTERS, plain_text
from armature.components.contracts.episodes import Environment, Observation, Split, Task
from armature.components.contracts.errors import ArmatureError, ConfigurationError, DataError, RolloutFailed, said
from armature.components.contracts.files import regular
from armature.components.contracts.images import EncodedImage
from armature.components.contracts.stages import Artifact, Stage, StageContext, StageReport
from armature.components.environments.guarded import GuardedEpisode
from armature.components.environments.make import at_commit, environment_sources, evaluated_sources, make_environment
from armature.components.environments.settings import EnvironmentSettings

# --- The preview image: a grid of the tasks' first observations ---

WIDTH, IMAGE, LINES, COLUMNS = 224, 192, 5, 4
HEIGHT = IMAGE + 12 * LINES + 12


def image_grid(observations: Sequence[tuple[str, Observation]]) -> Image.Image:
    """Draw a grid with one cell per (title, observation): the first image, the title and the beginning of the text."""
    rows = -(-len(observations) // COLUMNS)
    grid = Image.new("RGB", (WIDTH * COLUMNS, HEIGHT * rows), "white")
    for index, (title, observation) in enumerate(observations):
        grid.paste(_cell(title, observation), (WIDTH * (index % COLUMNS), HEIGHT * (index // COLUMNS)))
    return grid


def _cell(title: str, observation: Observation) -> Image.Image:
    cell = Image.new("RGB", (WIDTH, HEIGHT), "white")
    images = [part for part in observation.content if isinstance(part, EncodedImage)]
    text = " ".join(part for part in observation.content if isinstance(part, str))
    try:
        image = decode(images[0]) if images else None
    except DataError as error:  # the task is kept; its rollouts fail later and are counted as bad_image
        image, text = None, f"bad image: {error.what}"
    if image is not None:
        scale = (IMAGE - 8) / max(image.size)
        size = (max(1, round(image.width * scale)), max(1, round(image.height * scale)))
        cell.paste(image.resize(size, Image.Resampling.NEAREST), ((WIDTH - size[0]) // 2, 4))
    more = f" (+{len(images) - 1} images)" if len(images) > 1 else ""
    lines = [title + more, *textwrap.wrap(text, 36)][:LINES]
    caption = "\n".join(lines).encode("latin-1", "replace").decode("latin-1")  # the built-in font has only these
    ImageDraw.Draw(cell).multiline_text((8, IMAGE), caption, "black", ImageFont.load_default_imagefont())
    return cell


# --- The artifact: a table of tasks per split, and the environment's settings ---

TASKS = TableSchema("tasks", 2, pa.schema([("task_id", pa.string()), ("split", pa.string()), ("payload", pa.string())]))
SPLITS: tuple[Split, ...] = ("train", "heldout")
PREVIEWED = 16
ENVIRONMENT = "environment.json"


def write_tasks(
    settings: EnvironmentSettings, inputs: Mapping[str, Artifact], folder: Path, context: StageContext
) -> StageReport:
    """Write `train.parquet`, `heldout.parquet`, `environment.json` (the settings) and `preview.png` into `folder`.

    Rows of data that the environment left out are reported by reason, from its attribute `drops` if it has one.
    """
    rows: dict[str, int] = {}
    with closing(make_environment(settings, context.machine.workers.environments)) as environment:
        for split in SPLITS:
            most = settings.train_tasks if split == "train" else settings.heldout_tasks
            listed = _rows(environment, split, most)
            rows[split] = len(listed)
            write_table(folder / f"{split}.parquet", listed, TASKS)
            context.events.progress("tasks", len(rows), len(SPLITS))
        (folder / ENVIRONMENT).write_text(settings.model_dump_json(indent=1) + "\n")
        shown = load_tasks(folder, "train")[:PREVIEWED]
        image_grid(
            asyncio.run(_first_observations(environment, shown, context.machine.limits.environment_timeout))
        ).save(folder / "preview.png")
        drops = dict(getattr(environment, "drops", {}))
        if drops:
            counts = ", ".join(f"{count} {reason}" for reason, count in sorted(drops.items()))
            context.events.message(f"tasks: rows left out: {counts}")
    return StageReport(rows=rows, drops=drops)


TASKS_STAGE = Stage(
    "tasks",
    5,
    EnvironmentSettings,
    (),
    write_tasks,
    lambda settings, inputs: environment_sources(settings),
    lambda settings, inputs, say: at_commit(settings, say),
)


def load_tasks(folder: Path, split: Split) -> list[Task]:
    """Return the tasks of `split` from the tasks artifact at `folder`.

    Raises:
        DataError: the table is missing or has another version.
    """
    rows = read_table(folder / f"{split}.parquet", TASKS).to_pylist()
    return [Task(row["task_id"], row["split"], json.loads(row["payload"])) for row in rows]


def load_environment(folder: Path, processes: int = 0, *, evaluation: bool = False) -> Environment:
    """Return the environment whose tasks are in the artifact at `folder`.

    Args:
        folder: folder of a tasks artifact.
        processes: number of processes that the environment may start; 0 means half the number of CPU cores.
        evaluation: use the settings for evaluation, see `EnvironmentSettings.evaluation_args`.

    Raises:
        DataError: the artifact holds no settings of an environment.
    """
    settings = read_environment(folder)
    return make_environment(settings.for_evaluation() if evaluation else settings, processes)


def sources_of_tasks(settings: object, inputs: Mapping[str, Artifact]) -> dict[str, str]:
    """Return the sources of a stage that plays the tasks of its input `tasks`: digests of the environment's code and
    data.

    The result is empty if that input is not an artifact of the tasks stage; the stage then fails when it runs.
    """
    folder = inputs["tasks"].path
    if not (folder / ENVIRONMENT).is_file():
        return {}
    return evaluated_sources(read_environment(folder))


def read_environment(folder: Path) -> EnvironmentSettings:
    """Return the settings of the environment whose tasks are in the artifact at `folder`.

    Raises:
        DataError: the artifact has no such settings, or they are not valid in this version.
    """
    path = folder / ENVIRONMENT
    try:
        return EnvironmentSettings.model_validate_json(regular(path).read_bytes())
    except FileNotFoundError as error:
        raise DataError("not an artifact of the tasks stage", code="not_a_tasks_artifact", where=str(path)) from error
    except ValidationError as error:
        raise DataError(
            f"the file does not hold valid settings of an environment: {error.errors()[0]['msg']}",
            code="environment_settings_unreadable",
            where=str(path),
            remedy="make the tasks again with this version",
        ) from error


def _rows(environment: Environment, split: Split, most: int | None) -> list[dict[str, object]]:
    """Return the environment's tasks of a split as rows of the table. `most` limits their number; None is no limit.

    Raises:
        ConfigurationError: there are no tasks, more than `most`, two with one name, or one that is not a task of
            `split`.
    """
    where = f"environment {environment.name!r}, split {split!r}"
    try:
        rows = [_row(task, split) for task in islice(environment.tasks(split), None if most is None else most + 1)]
    except ArmatureError:
        raise
    except (Exception, SystemExit) as error:
        raise ConfigurationError(
            f"the tasks cannot be listed: {said(error)}", code="tasks_not_listed", where=where
        ) from error
    if not rows:
        raise ConfigurationError("the environment lists no tasks", code="no_tasks", where=where)
    if most is not None and len(rows) > most:
        raise ConfigurationError(
            f"the environment lists more than the {most} requested tasks", code="too_many_tasks", where=where
        )
    names = Counter(row["task_id"] for row in rows)
    (name, times), *_ = names.most_common(1)
    if times > 1:
        raise ConfigurationError(
            f"{times} tasks have the id {name!r}", code="task_repeated", where=where, remedy="give each task its own id"
        )
    return rows


def _row(task: object, split: Split) -> dict[str, object]:
    if not isinstance(task, Task):
        raise ValueError(f"a task was expected, not {type(task).__name__}")
    if task.split != split:
        raise ValueError(f"a task of split {task.split!r:.40}")
    payload = json.dumps(task.payload, sort_keys=True, separators=(",", ":"), allow_nan=False)
    if not isinstance(task.payload, dict) or len(payload) > MOST_CHARACTERS:
        raise ValueError(f"a payload of {len(payload)} characters; it has to be a dict of at most {MOST_CHARACTERS}")
    return {"task_id": plain_text("task_id", task.task_id), "split": split, "payload": payload}


async def _first_observations(
    environment: Environment, tasks: Iterable[Task], timeout: float
) -> list[tuple[str, Observation]]:
    """Return the id and the first observation of each task.

    Raises:
        ConfigurationError: an episode cannot be started.
    """
    first = []
    for task in tasks:
        episode = GuardedEpisode(environment, task, timeout, preview=True)
        try:
            first.append((task.task_id, await episode.reset()))
            await episode.close()
        except RolloutFailed as failed:
            with suppress(RolloutFailed):
                await episode.close()
            raise ConfigurationError(
                f"an episode cannot be started: {failed.detail}",
                code="episode_not_started",
                where=f"task {task.task_id}",
            ) from failed
    return first
