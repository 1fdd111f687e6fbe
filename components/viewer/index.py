"""What the page asks of the rollouts in a store."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from armature.components.viewer.tables import RolloutTables

TIMES, ANSWERS = 2000, 8
"""How often a task was played, and how many different answers of each time, are shown at most."""
_ORDERS = {
    "order": "step, group_id, trajectory_id",
    "newest": "step DESC, group_id, trajectory_id",
    "reward-": "reward DESC, step, trajectory_id",
    "reward+": "reward, step, trajectory_id",
    "length-": "tokens DESC, step, trajectory_id",
    "surprise+": "logprob, step, trajectory_id",
    "ratio-": "ratio DESC NULLS LAST, step, trajectory_id",
}
LAST_STEP = 2**31 - 1
"""The largest number in a column of steps."""
Number = Annotated[int, Field(ge=0, le=LAST_STEP)]
Order = Literal["order", "newest", "reward-", "reward+", "length-", "surprise+", "ratio-"]
Source = Literal["train", "panel", "evaluation"]
"""A training's own rollouts, its held-out panel between steps, or an evaluation."""


class Query(BaseModel):
    """Which rollouts of a run, in which order."""

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
    """What one checkpoint played: the rollouts of a run from one source, of one step or of all."""

    run: str
    source: Source
    step: int | None = None


class RolloutIndex(RolloutTables):
    """Answers from the tables that were read so far."""

    def __init__(self, store: Path) -> None:
        super().__init__(store)
        self._counts: tuple[int, dict[str, dict[str, Any]]] = (-1, {})

    def search(self, run: str, query: Query) -> dict[str, Any]:
        """`total` rollouts of the run fit the query; `rows` are some of them, `mean` is the mean reward of all."""
        where, values = _conditions(run, query)
        ratio, joined = "NULL", ""
        if query.sort == "ratio-":
            ratio, joined = "ratio", "LEFT JOIN ratios USING (run, step, trajectory_id)"
        found = self._rows(
            f"""WITH hits AS MATERIALIZED (
                SELECT rollouts.rowid AS place, step, group_id, trajectory_id, reward, tokens, logprob, {ratio} AS ratio
                FROM rollouts {joined} WHERE {where}
            ), page AS (
                SELECT place, row_number() OVER () AS rank
                FROM (SELECT place FROM hits ORDER BY {_ORDERS[query.sort]} LIMIT ? OFFSET ?)
            )
            SELECT total, mean, r.source, r.step, r.trajectory_id, r.group_id, r.task_id, r.split, r.truncated, r.turns,
                r.reward, r.tokens, r.completion[:160] AS completion
            FROM (SELECT count(*) AS total, avg(reward) AS mean FROM hits)
                LEFT JOIN page ON true LEFT JOIN rollouts r ON r.rowid = page.place
            ORDER BY page.rank""",
            [*values, query.limit, query.offset],
        )
        totals = [{name: row.pop(name) for name in ("total", "mean")} for row in found]
        return {**totals[0], "rows": [row for row in found if row["trajectory_id"] is not None]}

    def failures(self, run: str, query: Query) -> dict[str, Any]:
        """The rollouts of the run that failed, by reason, and some of them in full."""
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
        """The run's tasks: how often each was played, its mean reward, and groups in which nothing could be learned."""
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
        """How a task was answered, in the order of the steps: each time with its mean reward and its answers.

        The `answers` are the most frequent ones, each with how often it was given and one rollout that gave it.
        """
        return self._rows(
            f"""WITH said AS (
                SELECT run, source, step, completion[:2000] AS answer, count(*) AS n, avg(reward) AS reward,
                    min(trajectory_id) AS trajectory_id, min(group_id) AS group_id
                FROM rollouts WHERE list_contains(?, run) AND task_id = ? GROUP BY ALL
            )
            SELECT run, source, step, sum(n)::BIGINT AS rollouts, sum(n * reward) / sum(n) AS reward,
                count(*) AS different, list({{
                    'answer': answer, 'n': n, 'reward': reward, 'trajectory_id': trajectory_id, 'group_id': group_id
                }} ORDER BY n DESC, answer)[:{ANSWERS}] AS answers
            FROM said GROUP BY run, source, step ORDER BY step, source DESC, run LIMIT {TIMES}""",
            [list(runs), task],
        )

    def compare(self, first: Side, second: Side, query: Query) -> dict[str, Any]:
        """The tasks that both have played, those with the largest difference of their mean rewards first.

        With each the newest answer of either side and where it is: `first_step`, `first_group` and so on.
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
        """Rollouts, failures and the newest step of every run that has any, and after which steps its panel played."""
        revision = self.revision
        if self._counts[0] != revision:
            rows = self._rows(
                """SELECT run, sum(rollouts)::BIGINT AS rollouts, sum(failures)::BIGINT AS failures,
                max(step) FILTER (source != 'panel') AS last_step,
                list(DISTINCT step ORDER BY step) FILTER (source = 'panel') AS panels
                FROM (SELECT run, source, step, count(*) AS rollouts, 0 AS failures FROM rollouts GROUP BY ALL
                UNION ALL SELECT run, source, step, 0, count(*) FROM failures GROUP BY ALL) GROUP BY run""",
                [],
            )
            self._counts = revision, {row.pop("run"): row | {"panels": row["panels"] or []} for row in rows}
        return self._counts[1]


def _conditions(
    run: str, query: Query, texts: tuple[str, ...] = ("completion",), rewards: bool = True
) -> tuple[str, list[Any]]:
    """A WHERE clause and its values, in order."""
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
