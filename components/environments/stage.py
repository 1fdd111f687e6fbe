"""The stage that lists an environment's tasks, and the way back from its artifact to tasks and environment."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Mapping
from contextlib import closing
from pathlib import Path

import pyarrow as pa

from components.artifacts.tables import TableSchema, read_table, write_table
from components.contracts.episodes import Environment, Observation, Split, Task
from components.contracts.errors import ConfigurationError, DataError
from components.contracts.stages import Artifact, Report, Stage, StageContext
from components.environments.make import make_environment
from components.environments.preview import picture_grid
from components.environments.settings import EnvironmentSettings

TASKS = TableSchema("tasks", 1, pa.schema([("task_id", pa.string()), ("split", pa.string()), ("payload", pa.string())]))
SPLITS: tuple[Split, ...] = ("train", "heldout")
PREVIEWED = 16


def write_tasks(
    settings: EnvironmentSettings, inputs: Mapping[str, Artifact], folder: Path, context: StageContext
) -> Report:
    """`train.parquet`, `heldout.parquet`, `environment.json` (the settings) and `preview.png`."""
    rows: dict[str, int] = {}
    with closing(make_environment(settings, context.machine.environment_processes)) as environment:
        for split in SPLITS:
            tasks = list(environment.tasks(split))
            if not tasks:
                raise ConfigurationError(f"environment {settings.name!r} has no tasks in split {split!r}")
            rows[split] = len(tasks)
            write_table(folder / f"{split}.parquet", [_row(task) for task in tasks], TASKS)
            context.events.progress("tasks", len(rows), len(SPLITS))
        (folder / "environment.json").write_text(settings.model_dump_json(indent=1) + "\n")
        shown = load_tasks(folder, "train")[:PREVIEWED]
        picture_grid(asyncio.run(_first_observations(environment, shown))).save(folder / "preview.png")
    return Report(rows=rows)


TASKS_STAGE = Stage("tasks", 1, EnvironmentSettings, (), write_tasks)


def load_tasks(folder: Path, split: Split) -> list[Task]:
    """The tasks of `split` in the artifact at `folder`.

    Raises:
        DataError: the table is missing, or is one of another version.
    """
    rows = read_table(folder / f"{split}.parquet", TASKS).to_pylist()
    return [Task(row["task_id"], row["split"], json.loads(row["payload"])) for row in rows]


def load_environment(folder: Path, processes: int = 0) -> Environment:
    """The environment whose tasks are in the artifact at `folder`.

    Raises:
        DataError: the artifact does not say which environment that is.
    """
    path = folder / "environment.json"
    try:
        text = path.read_text()
    except FileNotFoundError as error:
        raise DataError("not an artifact of the tasks stage", where=str(path)) from error
    return make_environment(EnvironmentSettings.model_validate_json(text), processes)


def _row(task: Task) -> dict[str, object]:
    payload = json.dumps(task.payload, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return {"task_id": task.task_id, "split": task.split, "payload": payload}


async def _first_observations(environment: Environment, tasks: Iterable[Task]) -> list[tuple[str, Observation]]:
    first = []
    for task in tasks:
        episode = environment.episode(task)
        try:
            first.append((task.task_id, await episode.reset()))
        finally:
            await episode.close()
    return first
