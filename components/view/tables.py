"""What can be searched of the rollouts in a store: one row a trajectory, in a DuckDB file that goes when it is closed.

The tables of the store are read once, in the background, as runs write them: each step's is whole when it appears.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import duckdb

from components.batches.ratios import RATIOS_FOLDER

FILES_AT_ONCE = 64
MEMORY = "1GB"

_TABLES = """
CREATE TABLE rollouts (
    folder VARCHAR, source VARCHAR, run VARCHAR, step INTEGER, trajectory_id VARCHAR, group_id VARCHAR, task_id VARCHAR,
    split VARCHAR, truncated BOOLEAN, turns INTEGER, reward DOUBLE, tokens BIGINT, logprob DOUBLE, completion VARCHAR
);
CREATE TABLE failures (
    folder VARCHAR, source VARCHAR, run VARCHAR, step INTEGER, trajectory_id VARCHAR, group_id VARCHAR,
    task_id VARCHAR, reason VARCHAR, detail VARCHAR
);
CREATE TABLE ratios (folder VARCHAR, run VARCHAR, step INTEGER, trajectory_id VARCHAR, ratio DOUBLE);
"""
_PLACE = """
    regexp_extract(filename, '^(.*)/[^/]*$', 1) AS folder,
    CASE regexp_extract(filename, '/([^/]*)/[^/]*/[^/]*$', 1)
        WHEN 'rollouts' THEN 'train' WHEN 'evaluations' THEN 'panel' ELSE 'evaluation' END AS source,
    regexp_extract(filename, '/([^/-]*)(-[0-9]+)?/[^/]*$', 1) AS run,
    coalesce(try_cast(regexp_extract(filename, '-([0-9]+)/[^/]*$', 1) AS INTEGER), 0) AS step
"""
_ADD_ROLLOUTS = f"""
INSERT INTO rollouts SELECT {_PLACE}, trajectory_id, any_value(group_id), any_value(task_id), any_value(split),
    bool_or(truncated), count(*), sum(reward), sum(len(completion_token_ids)),
    sum(list_sum(completion_logprobs)) / nullif(sum(len(completion_logprobs)), 0),
    string_agg(completion, ' / ' ORDER BY turn)
FROM read_parquet(?, filename = true) GROUP BY filename, trajectory_id ORDER BY step, any_value(group_id), trajectory_id
"""
_ADD_FAILURES = f"""
INSERT INTO failures SELECT {_PLACE}, trajectory_id, group_id, task_id, reason, detail
FROM read_parquet(?, filename = true)
"""
_ADD_RATIOS = """
INSERT INTO ratios SELECT filename, regexp_extract(filename, '-([^/-]*)/[^/]*/[^/]*$', 1),
    CAST(regexp_extract(filename, '/([0-9]+)[.]parquet$', 1) AS INTEGER), trajectory_id,
    max(greatest(list_max(log_ratios), -list_min(log_ratios)))
FROM read_parquet(?, filename = true) GROUP BY filename, trajectory_id
"""


class RolloutTables:
    """Thread safe. `revision` grows whenever something was added or taken away; `problems` says what cannot be read."""

    def __init__(self, store: Path) -> None:
        self.store = store
        self.revision = 0
        self.problems: dict[str, str] = {}
        self._folder = Path(tempfile.mkdtemp(prefix="armature-view-"))
        self._database = duckdb.connect(
            str(self._folder / "index.duckdb"),
            config={
                "memory_limit": MEMORY,
                "temp_directory": str(self._folder / "spill"),
                "autoinstall_known_extensions": False,
                "autoload_known_extensions": False,
            },
        )
        self._database.execute(_TABLES)
        self._known: dict[str, tuple[int, int]] = {}
        self._lock = threading.Lock()

    def close(self) -> None:
        with self._lock:
            self._database.close()
            shutil.rmtree(self._folder, ignore_errors=True)

    def refresh(self, stopped: Callable[[], bool] = lambda: False) -> bool:
        """Read what is new in the store, and forget what is gone. Whether anything changed.

        Args:
            stopped: asked now and then; True ends it early.
        """
        with self._lock:
            there = dict(_tables(self.store))
            gone = [path for path, state in self._known.items() if there.get(path) != state]
            new = sorted(path for path, state in there.items() if self._known.get(path) != state)
            for path in gone:
                self._forget(path)
            for start in range(0, len(new), FILES_AT_ONCE):
                if stopped():
                    break
                part = new[start : start + FILES_AT_ONCE]
                self._read(part)
                self._known |= {path: there[path] for path in part}
                self.revision += 1
            self.revision += bool(gone)
            return bool(gone or new)

    def _forget(self, path: str) -> None:
        for table in ("rollouts", "failures", "ratios"):
            self._database.execute(f"DELETE FROM {table} WHERE folder = ?", [path])
        self._known.pop(path, None)
        self.problems.pop(path, None)

    def _read(self, paths: list[str]) -> None:
        """Read the tables of `paths` together, or, if one of them cannot be read, each on its own."""
        try:
            self._insert(paths)
        except duckdb.Error as error:
            if len(paths) == 1:
                self.problems[paths[0]] = str(error).partition("\n")[0]
                return
            for path in paths:
                self._read([path])

    def _insert(self, paths: list[str]) -> None:
        files = [path for path in paths if path.endswith(".parquet")]
        folders = [path for path in paths if path not in files]
        cursor = self._database.cursor()
        cursor.begin()
        try:
            if folders:
                cursor.execute(_ADD_ROLLOUTS, [[f"{folder}/rollouts.parquet" for folder in folders]])
                cursor.execute(_ADD_FAILURES, [[f"{folder}/failures.parquet" for folder in folders]])
            if files:
                cursor.execute(_ADD_RATIOS, [files])
            cursor.commit()
        except duckdb.Error:
            cursor.rollback()
            raise

    def _row(self, sql: str, values: Iterable[Any]) -> tuple[Any, ...]:
        found = self._database.cursor().execute(sql, list(values)).fetchone()
        assert found is not None
        return found

    def _rows(self, sql: str, values: Iterable[Any]) -> list[dict[str, Any]]:
        cursor = self._database.cursor().execute(sql, list(values))
        names = [column[0] for column in cursor.description]
        return [dict(zip(names, row, strict=True)) for row in cursor.fetchall()]


def _tables(store: Path) -> Iterator[tuple[str, tuple[int, int]]]:
    """Every folder with rollout tables and every table of ratios, and what changes when it is made again."""
    for parent in ("rollouts", "evaluations", "evaluate"):
        yield from ((entry.path, _state(entry)) for entry in _entries(store / parent) if entry.is_dir())
    for workspace in _entries(store / "workspaces"):
        files = _entries(Path(workspace.path, RATIOS_FOLDER))
        yield from ((entry.path, _state(entry)) for entry in files if entry.name.endswith(".parquet"))


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    try:
        return [entry for entry in os.scandir(folder) if not entry.name.startswith(".")]
    except (FileNotFoundError, NotADirectoryError):
        return []


def _state(entry: os.DirEntry[str]) -> tuple[int, int]:
    try:
        state = entry.stat()
    except FileNotFoundError:  # it is just being replaced
        return 0, 0
    return state.st_ino, state.st_mtime_ns
