"""From outcomes to tables and numbers: one row per planned episode, rates per task, suite and over all."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from statistics import fmean
from typing import Any

import pyarrow as pa

from components.artifacts.tables import TableSchema, read_table, write_table
from components.evaluation.libero.journal import EpisodeOutcome
from components.evaluation.libero.schedule import EpisodeKey, PlannedEpisode
from components.evaluation.wilson import Interval, wilson_interval

RESULTS_FILE = "results.parquet"
RESULTS = TableSchema(
    "libero-results",
    1,
    pa.schema(
        [
            ("suite", pa.string()),
            ("task", pa.int32()),
            ("language", pa.string()),
            ("episode", pa.int32()),
            ("initial_state", pa.int32()),
            ("simulator_seed", pa.int64()),
            ("success", pa.bool_()),
            ("steps", pa.int32()),
            ("actions", pa.list_(pa.float32())),  # (steps, 7), row by row
            ("failure", pa.string()),  # why it could not be played, null where it was
        ]
    ),
)


@dataclass(frozen=True)
class LiberoResult:
    """One planned episode. One that could not be played has a `failure`, no steps, and is not solved."""

    suite: str
    task: int
    language: str
    episode: int
    initial_state: int
    simulator_seed: int
    success: bool
    steps: int
    actions: tuple[float, ...]
    failure: str | None

    @property
    def key(self) -> EpisodeKey:
        return (self.suite, self.task, self.episode)


def collect_results(
    planned: Sequence[PlannedEpisode], outcomes: Mapping[EpisodeKey, EpisodeOutcome]
) -> list[LiberoResult]:
    """In the order of the plan."""
    return [_result(each, outcomes[each.key]) for each in planned]


def _result(planned: PlannedEpisode, outcome: EpisodeOutcome) -> LiberoResult:
    return LiberoResult(
        suite=planned.task.suite,
        task=planned.task.index,
        language=planned.task.language,
        episode=planned.episode,
        initial_state=planned.initial_state,
        simulator_seed=planned.simulator_seed,
        success=outcome.success,
        steps=outcome.steps,
        actions=tuple(map(float, outcome.actions.reshape(-1))),
        failure=outcome.failure,
    )


def write_results(folder: Path, results: Sequence[LiberoResult]) -> None:
    write_table(folder / RESULTS_FILE, [vars(result) for result in results], RESULTS)


def read_results(folder: Path) -> list[LiberoResult]:
    """
    Raises:
        DataError: the folder is not an evaluation in LIBERO.
    """
    rows = read_table(folder / RESULTS_FILE, RESULTS).to_pylist()
    return [LiberoResult(**{**row, "actions": tuple(row["actions"])}) for row in rows]


def success_rate(results: Sequence[LiberoResult]) -> Interval:
    """Solved of all planned, with Wilson's interval.

    The episodes are trials of fixed tasks: the interval says what other noise and other initial states of these
    tasks would give, not what other tasks would.
    """
    return wilson_interval(sum(result.success for result in results), len(results))


def by_suite(results: Sequence[LiberoResult]) -> dict[str, list[LiberoResult]]:
    return {suite: list(group) for suite, group in groupby(results, lambda result: result.suite)}


def by_task(results: Sequence[LiberoResult]) -> dict[tuple[str, int], list[LiberoResult]]:
    return {key: list(group) for key, group in groupby(results, lambda result: result.key[:2])}


def metrics(results: Sequence[LiberoResult]) -> dict[str, Any]:
    """Numbers for `metrics.json`. `suite_mean` is what papers call average: the mean of the suites' rates."""
    suites = by_suite(results)
    return {
        **_numbers(results),
        "suite_mean": fmean(success_rate(group).estimate for group in suites.values()),
        "failures": dict(sorted(Counter(result.failure for result in results if result.failure).items())),
        "suites": {suite: _numbers(group) for suite, group in suites.items()},
        "tasks": {f"{suite}/{task}": _numbers(group) for (suite, task), group in by_task(results).items()},
    }


def _numbers(results: Sequence[LiberoResult]) -> dict[str, float]:
    rate = success_rate(results)
    solved = [result.steps for result in results if result.success]
    steps = {"steps_when_solved": fmean(solved)} if solved else {}
    return {
        "success": rate.estimate,
        "success_low": rate.low,
        "success_high": rate.high,
        "episodes": len(results),
        "failed": sum(result.failure is not None for result in results),
        **steps,
    }
