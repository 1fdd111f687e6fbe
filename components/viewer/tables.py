"""Search index over the rollouts of a store: a DuckDB database in memory with a row for each trajectory.

Each table of the store is read once, in the background. Runs publish the table of a step only when it is complete. A
database larger than `MEMORY` continues in a temporary folder. If the process is killed, the next index removes it.
"""

from __future__ import annotations

import glob
import os
import secrets
import shutil
import tempfile
import threading
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Annotated, Any, Literal

import duckdb
import psutil
from pydantic import BaseModel, ConfigDict, Field

from armature.components.contracts.files import regular
from armature.components.rollouts.batches.ratios import RATIOS_FOLDER

FILES_AT_ONCE = 64
MEMORY = "1GB"
SPILL = "armature-view-"
"""First part of the name of an index's temporary folder. The process id follows it."""

_TABLES = """
CREATE TABLE rollouts (
    folder VARCHAR, source VARCHAR, run VARCHAR, step INTEGER, trajectory_id VARCHAR, group_id VARCHAR, task_id VARCHAR,
    split VARCHAR, truncated BOOLEAN, turns INTEGER, reward DOUBLE, tokens BIGINT, logprob DOUBLE, completion VARCHAR,
    image VARCHAR
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
        WHEN 'rollouts' THEN 'train' WHEN 'evaluations' THEN 'heldout' ELSE 'evaluation' END AS source,
    regexp_extract(filename, '/([^/-]*)(-[0-9]+)?/[^/]*$', 1) AS run,
    coalesce(try_cast(regexp_extract(filename, '-([0-9]+)/[^/]*$', 1) AS INTEGER), 0) AS step
"""
# Without hive_partitioning = false, a folder called reward=1 would become a column.
_FILES = "read_parquet(?, filename = true, hive_partitioning = false)"
_ADD_ROLLOUTS = f"""
INSERT INTO rollouts SELECT {_PLACE}, trajectory_id, any_value(group_id), any_value(task_id), any_value(split),
    bool_or(truncated), count(*), sum(reward), sum(len(completion_token_ids)),
    sum(list_sum(completion_logprobs)) / nullif(sum(len(completion_logprobs)), 0),
    string_agg(completion, ' / ' ORDER BY turn),
    arg_min(images[1].sha256 || '.' || split_part(images[1].media_type, '/', 2), turn)
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
    """Reads the tables of a store into a DuckDB database. It is thread safe.

    `revision` grows whenever tables were added or removed.
    """

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
        self._indexed: dict[str, tuple[int, int]] = {}
        self._unread: dict[str, str] = {}

    @property
    def problems(self) -> dict[str, str]:
        """For each folder or file of the store that cannot be listed or read, the reason, by path."""
        return {**self._unlisted, **self._unread}

    def close(self) -> None:
        with self._lock:
            self._database.close()
            shutil.rmtree(self._spill, ignore_errors=True)

    def refresh(self, stopped: Callable[[], bool] = lambda: False) -> bool:
        """Read new tables of the store, drop removed ones, and return True if anything changed.

        A table that cannot be read is added to `problems`, and the others are read all the same.

        Args:
            stopped: called between tables; if it returns True, reading ends early.

        Raises:
            duckdb.Error: the database cannot be used any more; the next call begins with a new one.
        """
        with self._lock:
            try:
                return self._refresh(stopped)
            except duckdb.Error:
                self._open()  # queries that run in the old database still get their answer
                raise

    def _refresh(self, stopped: Callable[[], bool]) -> bool:
        tables = self._tables()
        gone = [path for path, state in self._indexed.items() if tables.get(path) != state]
        new = sorted(path for path, state in tables.items() if self._indexed.get(path) != state)
        self._forget(gone)
        for start in range(0, len(new), FILES_AT_ONCE):
            if stopped():
                break
            part = new[start : start + FILES_AT_ONCE]
            self._read(part)
            self._indexed |= {path: tables[path] for path in part}
            self.revision += 1
        self.revision += bool(gone)
        return bool(gone or new)

    def _tables(self) -> dict[str, tuple[int, int]]:
        """Return the paths of all folders with rollout tables and of all tables of log-ratios in the store. The values
        are the inode and the modification time in nanoseconds."""
        tables: dict[str, tuple[int, int]] = {}
        problems: dict[str, str] = {}
        for parent in ("rollouts", "evaluations", "evaluate"):
            tables |= _listed(self.store / parent, lambda entry: entry.is_dir(), problems)
        for workspace in _listed(self.store / "workspaces", lambda entry: entry.is_dir(), problems):
            tables |= _listed(Path(workspace, RATIOS_FOLDER), lambda entry: entry.name.endswith(".parquet"), problems)
        self._unlisted = problems
        return tables

    def _forget(self, paths: list[str]) -> None:
        for table in ("rollouts", "failures", "ratios") if paths else ():  # each is read once for all paths
            self._database.execute(f"DELETE FROM {table} WHERE folder IN (SELECT unnest(?))", [paths])
        for path in paths:
            self._indexed.pop(path, None)
            self._unread.pop(path, None)

    def _read(self, paths: list[str]) -> None:
        """Read the tables of all `paths` together. If that fails, read them one by one, and record which of them cannot
        be read."""
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
        row = self._database.cursor().execute(sql, list(values)).fetchone()
        assert row is not None
        return row

    def _rows(self, sql: str, values: Iterable[Any]) -> list[dict[str, Any]]:
        cursor = self._database.cursor().execute(sql, list(values))
        names = [column[0] for column in cursor.description]
        return [dict(zip(names, row, strict=True)) for row in cursor.fetchall()]


def _literal(*parts: str) -> str:
    """Return a DuckDB file pattern that matches only the file whose path consists of `parts`.

    Raises:
        OSError: this is not a regular file.
    """
    return glob.escape(str(regular(Path(*parts))))


def _listed(
    folder: Path, wanted: Callable[[os.DirEntry[str]], bool], problems: dict[str, str]
) -> dict[str, tuple[int, int]]:
    """Return the entries of `folder` for which `wanted` is true, by path. The values are the inode and the modification
    time in nanoseconds, which show that an entry has been replaced.

    Entries that cannot be read are added to `problems` with the reason.
    """
    listing: dict[str, tuple[int, int]] = {}
    try:
        entries = [entry for entry in os.scandir(folder) if not entry.name.startswith(".")]
    except (FileNotFoundError, NotADirectoryError):
        return listing
    except OSError as error:
        problems[_shown(str(folder))] = _reason(error)
        return listing
    for entry in entries:
        try:
            entry.path.encode()
            if wanted(entry):
                state = entry.stat()
                listing[entry.path] = state.st_ino, state.st_mtime_ns
        except FileNotFoundError:  # the entry is being replaced, or is a broken link
            continue
        except (OSError, ValueError) as error:  # a link to itself, or a name that is not UTF-8
            problems[_shown(entry.path)] = _reason(error)
    return listing


def _shown(path: str) -> str:
    return os.fsencode(path).decode(errors="replace")


def _reason(error: Exception) -> str:
    return (isinstance(error, OSError) and error.strerror) or str(error).partition("\n")[0]


def _remove_abandoned() -> None:
    """Remove the temporary folders that indexes of killed processes have left."""
    for folder in Path(tempfile.gettempdir()).glob(f"{SPILL}*-*"):
        process = folder.name.removeprefix(SPILL).partition("-")[0]
        if process.isdecimal() and not psutil.pid_exists(int(process)):
            shutil.rmtree(folder, ignore_errors=True)


TIMES, ANSWERS = 2000, 8
"""Limits of the result of `RolloutIndex.changes`: at most `TIMES` rows, and at most `ANSWERS` answers in a row."""
_ORDERS = {
    "order": "step, group_id, trajectory_id",
    "newest": "step DESC, group_id, trajectory_id",
    "reward-": "reward DESC, step, trajectory_id",
    "reward+": "reward, step, trajectory_id",
    "length-": "tokens DESC, step, trajectory_id",
    "surprise+": "logprob, step, trajectory_id",
    "ratio-": "ratio DESC NULLS LAST, step, trajectory_id",
}
_OF_STEPS = {"source", "first_step", "last_step", "sort", "offset", "limit"}
LAST_STEP = 2**31 - 1
"""Largest number that the column `step` (a 32-bit integer) can hold."""
Number = Annotated[int, Field(ge=0, le=LAST_STEP)]
Order = Literal["order", "newest", "reward-", "reward+", "length-", "surprise+", "ratio-"]
Source = Literal["train", "heldout", "evaluation"]
"""Origin of rollouts: the training steps, the held-out set between steps, or an evaluation."""


class Query(BaseModel):
    """Filters and order of a search for rollouts, as the page sends them in the query string."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    find: str = Field("", max_length=1000)
    task: str = Field("", max_length=1000)
    group: str = Field("", max_length=1000)
    source: Source | Literal[""] = ""
    split: str = Field("", max_length=100)
    first_step: Number | None = None
    last_step: Number | None = None
    low: float | None = None
    high: float | None = None
    sort: Order = "order"
    offset: Number = 0
    limit: int = Field(100, ge=1, le=500)


@dataclass(frozen=True)
class Side:
    """One of two sets of rollouts to compare: a run's rollouts from one source, of one step or of all steps."""

    run: str
    source: Source
    step: int | None = None


class RolloutIndex(RolloutTables):
    """Answers the page's searches in rollouts from the tables that have been read so far."""

    def __init__(self, store: Path) -> None:
        super().__init__(store)
        self._steps: tuple[int, dict[str, list[dict[str, Any]]]] = (-1, {})

    def search(self, run: str, query: Query) -> dict[str, Any]:
        """Search the rollouts of a run. Return the number of matching rollouts (`total`), their mean reward (`mean`),
        and the part of them that `query.offset` and `query.limit` select (`rows`)."""
        totals, query = self._page(run, query)
        where, values = _conditions(run, query)
        ratio, joined = "NULL", ""
        if query.sort == "ratio-":
            ratio, joined = "ratio", "LEFT JOIN ratios USING (run, step, trajectory_id)"
        rows = self._rows(
            f"""WITH hits AS MATERIALIZED (
                SELECT rollouts.rowid AS place, step, group_id, trajectory_id, reward, tokens, logprob, {ratio} AS ratio
                FROM rollouts {joined} WHERE {where}
            ), page AS (
                SELECT place, row_number() OVER () AS rank
                FROM (SELECT place FROM hits ORDER BY {_ORDERS[query.sort]} LIMIT ? OFFSET ?)
            )
            SELECT total, mean, r.source, r.step, r.trajectory_id, r.group_id, r.task_id, r.split, r.truncated, r.turns,
                r.reward, r.tokens, r.completion[:1000] AS completion, '/images/' || r.image AS image
            FROM (SELECT count(*) AS total, avg(reward) AS mean FROM hits)
                LEFT JOIN page ON true LEFT JOIN rollouts r ON r.rowid = page.place
            ORDER BY page.rank""",
            [*values, query.limit, query.offset],
        )
        matching = [{name: row.pop(name) for name in ("total", "mean")} for row in rows]
        return {**matching[0], **totals, "rows": [row for row in rows if row["trajectory_id"] is not None]}

    def _page(self, run: str, query: Query) -> tuple[dict[str, Any], Query]:
        """If a query has the order of steps and filters by steps and source alone, return the `total` and `mean` of its
        search, and a query that reads only the steps of the same page."""
        if query.sort not in ("order", "newest") or not query.model_dump(exclude_defaults=True).keys() <= _OF_STEPS:
            return {}, query
        low, high = query.first_step or 0, LAST_STEP if query.last_step is None else query.last_step
        counts, reward = Counter[int](), 0.0
        for each in self._by_step().get(run, ()):
            if low <= each["step"] <= high and query.source in ("", each["source"]):
                counts[each["step"]] += each["rollouts"]
                reward += each["reward"] or 0.0
        steps = sorted(counts, reverse=query.sort == "newest")
        ends = list(accumulate((counts[step] for step in steps), initial=0))
        first, last = bisect_right(ends, query.offset) - 1, bisect_left(ends, query.offset + query.limit)
        shown = {"first_step": min(steps[first:last], default=1), "last_step": max(steps[first:last], default=0)}
        totals = {"total": ends[-1], "mean": reward / ends[-1] if ends[-1] else None}
        return totals, query.model_copy(update={**shown, "offset": query.offset - ends[first]})

    def failures(self, run: str, query: Query) -> dict[str, Any]:
        """Search the failed rollouts of a run. Return the number of matching ones (`total`), their numbers by reason
        (`reasons`), and the part of them that `query.offset` and `query.limit` select (`rows`)."""
        where, values = _conditions(run, query, texts=("reason", "detail"), rewards=False)
        reasons = self._rows(
            f"SELECT reason, count(*) AS count FROM failures WHERE {where} GROUP BY reason ORDER BY count DESC, reason",
            values,
        )
        rows = self._rows(
            f"""SELECT source, step, trajectory_id, group_id, task_id, reason, detail[:2000] AS detail
            FROM failures WHERE {where} ORDER BY step DESC, trajectory_id LIMIT ? OFFSET ?""",
            [*values, query.limit, query.offset],
        )
        return {"total": sum(row["count"] for row in reasons), "reasons": reasons, "rows": rows}

    def tasks(self, run: str, query: Query) -> dict[str, Any]:
        """Return the tasks of a run: their number (`total`), and one page of them (`rows`), lowest mean reward first.

        A row has the task's number of rollouts, their mean reward, its number of groups, and the number of groups whose
        rewards are all equal, from which nothing can be learned (`equal_groups`).
        """
        where, values = _conditions(run, query)
        grouped = f"""
            WITH groups AS (
                SELECT task_id, group_id, source, step, count(*) AS n, sum(reward) AS total,
                    max(reward) - min(reward) <= 1e-9 AS equal
                FROM rollouts WHERE {where} GROUP BY task_id, group_id, source, step
            )
            SELECT task_id, sum(n)::BIGINT AS rollouts, sum(total) / sum(n) AS reward, count(*) AS groups,
                count(*) FILTER (equal) AS equal_groups, min(step) AS first_step, max(step) AS last_step,
                arg_min(total / n, step) AS first_reward, arg_max(total / n, step) AS last_reward
            FROM groups GROUP BY task_id
        """
        (total,) = self._row(f"SELECT count(DISTINCT task_id) FROM rollouts WHERE {where}", values)
        rows = self._rows(f"{grouped} ORDER BY reward, task_id LIMIT ? OFFSET ?", [*values, query.limit, query.offset])
        return {"total": total, "rows": rows}

    def changes(self, runs: Sequence[str], task: str) -> list[dict[str, Any]]:
        """Return the answers to a task in several runs: one row for each run, source and step, with the mean reward.

        In a row, `answers` are the most frequent answers, each with its count and one rollout that gave it.
        """
        return self._rows(
            f"""WITH answered AS (
                SELECT run, source, step, completion[:2000] AS answer, count(*) AS n, avg(reward) AS reward,
                    min(trajectory_id) AS trajectory_id, min(group_id) AS group_id
                FROM rollouts WHERE list_contains(?, run) AND task_id = ? GROUP BY ALL
            )
            SELECT run, source, step, sum(n)::BIGINT AS rollouts, sum(n * reward) / sum(n) AS reward,
                count(*) AS different, list({{
                    'answer': answer, 'n': n, 'reward': reward, 'trajectory_id': trajectory_id, 'group_id': group_id
                }} ORDER BY n DESC, answer)[:{ANSWERS}] AS answers
            FROM answered GROUP BY run, source, step ORDER BY step, source DESC, run LIMIT {TIMES}""",
            [list(runs), task],
        )

    def compare(self, first: Side, second: Side, query: Query) -> dict[str, Any]:
        """Compare two sets of rollouts on the tasks that both have played.

        Return the number of these tasks (`total`), the number on which the second set has a higher mean reward
        (`better`) or a lower one (`worse`), and one page of the tasks (`rows`). The tasks with the largest difference
        in mean reward come first. A row has, for both sets, the mean reward, the newest answer, and the step and group
        of this answer: `first_step`, `first_group` and so on.
        """
        conditions = [
            _conditions(
                side.run,
                query.model_copy(update={"source": side.source, "first_step": side.step, "last_step": side.step}),
                texts=(),
            )
            for side in (first, second)
        ]
        sides = [
            f"""SELECT task_id, avg(reward) AS reward, count(*) AS n, max(step) AS step,
                arg_max(group_id, (step, trajectory_id)) AS group_id,
                arg_max(completion, (step, trajectory_id))[:400] AS completion
            FROM rollouts WHERE {where} GROUP BY task_id"""
            for where, _ in conditions
        ]
        values = [value for _, part in conditions for value in part]
        joined = f"FROM ({sides[0]}) a JOIN ({sides[1]}) b USING (task_id)"
        total, better, worse = self._row(
            f"""SELECT count(*), count(*) FILTER (b.reward > a.reward + 1e-9),
            count(*) FILTER (b.reward < a.reward - 1e-9) {joined}""",
            values,
        )
        columns = ", ".join(
            f"{side}.reward AS {name}_reward, {side}.n AS {name}_rollouts, {side}.step AS {name}_step, "
            f"{side}.group_id AS {name}_group, {side}.completion AS {name}_completion"
            for side, name in (("a", "first"), ("b", "second"))
        )
        rows = self._rows(
            f"""SELECT task_id, {columns} {joined}
            ORDER BY abs(b.reward - a.reward) DESC, task_id LIMIT ? OFFSET ?""",
            [*values, query.limit, query.offset],
        )
        return {"total": total, "better": better, "worse": worse, "rows": rows}

    def counts(self) -> Mapping[str, dict[str, Any]]:
        """Return, by run, the number of rollouts, the number of failures, the newest step, and the steps at which the
        held-out set was played."""
        counts = {}
        for run, rows in self._by_step().items():
            heldout = {row["step"] for row in rows if row["source"] == "heldout"}
            last = max((row["step"] for row in rows if row["source"] != "heldout"), default=None)
            counts[run] = {name: sum(row[name] for row in rows) for name in ("rollouts", "failures")}
            counts[run] |= {"last_step": last, "heldout_steps": sorted(heldout)}
        return counts

    def _by_step(self) -> dict[str, list[dict[str, Any]]]:
        """Return, by run, the number of rollouts, the sum of their rewards and the number of failures of each source
        and step. The tables are read once per revision."""
        revision = self.revision
        if self._steps[0] != revision:
            steps = defaultdict(list)
            for row in self._rows(
                """SELECT run, source, step, count(*) AS rollouts, sum(reward) AS reward, 0 AS failures FROM rollouts
                GROUP BY ALL UNION ALL SELECT run, source, step, 0, 0, count(*) FROM failures GROUP BY ALL""",
                [],
            ):
                steps[row.pop("run")].append(row)
            self._steps = revision, dict(steps)
        return self._steps[1]


def _conditions(
    run: str, query: Query, texts: tuple[str, ...] = ("completion",), rewards: bool = True
) -> tuple[str, list[Any]]:
    """Return the conditions of a query as an SQL text for a WHERE clause, and the values of its parameters in order.

    Args:
        texts: columns that are searched for `query.find`, in addition to the ids of task and trajectory.
        rewards: True if the table has rewards and splits to filter by.
    """
    conditions: list[str] = ["run = ?"]
    values: list[Any] = [run]
    asked: list[tuple[str, Any]] = [
        ("task_id = ?", query.task or None),
        ("group_id = ?", query.group or None),
        ("source = ?", query.source or None),
        ("step >= ?", query.first_step),
        ("step <= ?", query.last_step),
    ]
    if rewards:
        asked += [("reward >= ?", query.low), ("reward <= ?", query.high), ("split = ?", query.split or None)]
    for condition, value in asked:
        if value is not None:
            conditions.append(condition)
            values.append(value)
    if query.find:
        searched = (*texts, "task_id", "trajectory_id")
        conditions.append("(" + " OR ".join(f"contains(lower({name}), lower(?))" for name in searched) + ")")
        values += [query.find] * len(searched)
    return " AND ".join(conditions), values
