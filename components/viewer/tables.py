"""What can be searched of the rollouts in a store: one row a trajectory, in a DuckDB database in memory.

The tables of the store are read once, in the background, as runs write them: each step's is whole when it appears.
Past `MEMORY` the database goes on in a folder that is made then; a later index removes it if its process was killed.
"""

from __future__ import annotations

import glob
import os
import secrets
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import duckdb
import psutil

from armature.components.contracts.files import regular
from armature.components.rollouts.batches.ratios import RATIOS_FOLDER

FILES_AT_ONCE = 64
MEMORY = "1GB"
SPILL = "armature-view-"
"""How the name of the folder begins; the number of its process follows."""

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
# A folder called reward=1 must not become a column.
_FILES = "read_parquet(?, filename = true, hive_partitioning = false)"
_ADD_ROLLOUTS = f"""
INSERT INTO rollouts SELECT {_PLACE}, trajectory_id, any_value(group_id), any_value(task_id), any_value(split),
    bool_or(truncated), count(*), sum(reward), sum(len(completion_token_ids)),
    sum(list_sum(completion_logprobs)) / nullif(sum(len(completion_logprobs)), 0),
    string_agg(completion, ' / ' ORDER BY turn)
FROM {_FILES} GROUP BY filename, trajectory_id ORDER BY step, any_value(group_id), trajectory_id
"""
_ADD_FAILURES = f"""
INSERT INTO failures SELECT {_PLACE}, trajectory_id, group_id, task_id, reason, detail
FROM {_FILES}
"""
_ADD_RATIOS = f"""
INSERT INTO ratios SELECT filename, regexp_extract(filename, '-([^/-]*)/[^/]*/[^/]*$', 1),
    CAST(regexp_extract(filename, '/([0-9]+)[.]parquet$', 1) AS INTEGER), trajectory_id,
    max(greatest(list_max(log_ratios), -list_min(log_ratios)))
FROM {_FILES} GROUP BY filename, trajectory_id
"""


class RolloutTables:
    """Thread safe. `revision` grows whenever something was added or taken away."""

    def __init__(self, store: Path) -> None:
        self.store = store
        self.revision = 0
        self._unlisted: dict[str, str] = {}
        _remove_abandoned()
        self._spill = Path(tempfile.gettempdir(), f"{SPILL}{os.getpid()}-{secrets.token_hex(4)}")
        self._lock = threading.Lock()
        self._open()

    def _open(self) -> None:
        config: dict[str, str | bool | int | float | list[str]] = {
            "memory_limit": MEMORY,
            "temp_directory": str(self._spill),
            "autoinstall_known_extensions": False,
            "autoload_known_extensions": False,
        }
        database = duckdb.connect(":memory:", config=config)
        database.execute(_TABLES)
        self._database = database
        self._known: dict[str, tuple[int, int]] = {}
        self._unread: dict[str, str] = {}

    @property
    def problems(self) -> dict[str, str]:
        """The reason for each entry of the store that cannot be listed or read, by its path."""
        return {**self._unlisted, **self._unread}

    def close(self) -> None:
        with self._lock:
            self._database.close()
            shutil.rmtree(self._spill, ignore_errors=True)

    def refresh(self, stopped: Callable[[], bool] = lambda: False) -> bool:
        """Read what is new in the store, and forget what is gone. Whether anything changed.

        What cannot be read is one of the `problems`, and the rest is read all the same.

        Args:
            stopped: asked now and then; True ends it early.

        Raises:
            duckdb.Error: the database cannot be used any more; the next call begins with a new one.
        """
        with self._lock:
            try:
                return self._refresh(stopped)
            except duckdb.Error:
                self._open()  # who asks the old one just now has its answer
                raise

    def _refresh(self, stopped: Callable[[], bool]) -> bool:
        there = self._tables()
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

    def _tables(self) -> dict[str, tuple[int, int]]:
        """Every folder with rollout tables and every table of ratios, and what changes when it is made again."""
        found: dict[str, tuple[int, int]] = {}
        problems: dict[str, str] = {}
        for parent in ("rollouts", "evaluations", "evaluate"):
            found |= _listed(self.store / parent, lambda entry: entry.is_dir(), problems)
        for workspace in _listed(self.store / "workspaces", lambda entry: entry.is_dir(), problems):
            found |= _listed(Path(workspace, RATIOS_FOLDER), lambda entry: entry.name.endswith(".parquet"), problems)
        self._unlisted = problems
        return found

    def _forget(self, path: str) -> None:
        for table in ("rollouts", "failures", "ratios"):
            self._database.execute(f"DELETE FROM {table} WHERE folder = ?", [path])
        self._known.pop(path, None)
        self._unread.pop(path, None)

    def _read(self, paths: list[str]) -> None:
        """Read the tables of `paths` together, or, if one of them cannot be read, each on its own."""
        try:
            self._insert(paths)
        except duckdb.FatalException:
            raise
        except Exception as error:
            if len(paths) == 1:
                self._unread[paths[0]] = _reason(error)
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
                cursor.execute(_ADD_ROLLOUTS, [[_literal(folder, "rollouts.parquet") for folder in folders]])
                cursor.execute(_ADD_FAILURES, [[_literal(folder, "failures.parquet") for folder in folders]])
            if files:
                cursor.execute(_ADD_RATIOS, [[_literal(file) for file in files]])
            cursor.commit()
        except BaseException:
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


def _literal(*parts: str) -> str:
    """A pattern of DuckDB's that matches this one file.

    Raises:
        OSError: it is not a regular file.
    """
    return glob.escape(str(regular(Path(*parts))))


def _listed(
    folder: Path, wanted: Callable[[os.DirEntry[str]], bool], problems: dict[str, str]
) -> dict[str, tuple[int, int]]:
    """The entries of `folder` that are wanted, with what changes when one is made again.

    The reasons for those that cannot be looked at are added to `problems`.
    """
    found: dict[str, tuple[int, int]] = {}
    try:
        entries = [entry for entry in os.scandir(folder) if not entry.name.startswith(".")]
    except (FileNotFoundError, NotADirectoryError):
        return found
    except OSError as error:
        problems[_shown(str(folder))] = _reason(error)
        return found
    for entry in entries:
        try:
            entry.path.encode()
            if wanted(entry):
                state = entry.stat()
                found[entry.path] = state.st_ino, state.st_mtime_ns
        except FileNotFoundError:  # it is just being replaced, or a link that leads nowhere
            continue
        except (OSError, ValueError) as error:  # a link to itself, or a name that is not UTF-8
            problems[_shown(entry.path)] = _reason(error)
    return found


def _shown(path: str) -> str:
    return os.fsencode(path).decode(errors="replace")


def _reason(error: Exception) -> str:
    return (isinstance(error, OSError) and error.strerror) or str(error).partition("\n")[0]


def _remove_abandoned() -> None:
    """Remove what an index whose process was killed has left."""
    for folder in Path(tempfile.gettempdir()).glob(f"{SPILL}*-*"):
        process = folder.name.removeprefix(SPILL).partition("-")[0]
        if process.isdecimal() and not psutil.pid_exists(int(process)):
            shutil.rmtree(folder, ignore_errors=True)
