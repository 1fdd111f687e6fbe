"""Results of an evaluation: one row per planned episode, and metrics over these rows."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any, TypeVar

import pyarrow as pa

from armature.components.artifacts.tables import TableSchema, write_table
from armature.components.contracts.episodes import Task
from armature.components.contracts.errors import ServerError
from armature.components.contracts.rollouts import Failure, GenerateOutputs, Trajectory
from armature.components.environments.make import task_kind
from armature.components.environments.stage import load_tasks
from armature.components.evaluation.settings import EvaluationSettings
from armature.components.evaluation.wilson import Interval, clustered_wilson_interval, mean_interval

ValueT = TypeVar("ValueT")

RESULTS_FILE = "results.parquet"
RESULTS = TableSchema(
    "evaluation-results",
    2,
    pa.schema(
        [
            ("trajectory_id", pa.string()),
            ("task_id", pa.string()),
            ("split", pa.string()),
            ("kind", pa.string()),
            ("solved", pa.bool_()),
            ("reward", pa.float64()),  # null if the episode failed
            ("reward_parts", pa.map_(pa.string(), pa.float64())),
            ("turns", pa.int32()),
            ("completion_tokens", pa.int32()),
            ("format_errors", pa.int32()),  # turns whose answer could not be parsed
            ("inadmissible_actions", pa.int32()),  # turns whose action was not possible
            ("truncated", pa.bool_()),
            ("failure", pa.string()),  # the reason; null if the episode was finished
        ]
    ),
)


MEAN_COLUMNS = ("turns", "completion_tokens", "format_errors", "inadmissible_actions", "truncated")
"""Columns whose means over finished episodes are metrics."""


@dataclass(frozen=True)
class EpisodeResult:
    """Result of one planned episode, a row of `results.parquet`.

    A failed episode has the reason in `failure`, no reward, and counts as not solved. `format_errors` is the number of
    turns whose answer could not be parsed. `inadmissible_actions` is the number of turns whose action was not possible.
    """

    trajectory_id: str
    task_id: str
    split: str
    kind: str
    solved: bool
    reward: float | None = None
    reward_parts: Mapping[str, float] = field(default_factory=dict)
    turns: int = 0
    completion_tokens: int = 0
    format_errors: int = 0
    inadmissible_actions: int = 0
    truncated: bool = False
    failure: str | None = None

    def row(self) -> dict[str, Any]:
        """Return the result as a row of the table `results.parquet`, by column name."""
        return {**self.__dict__, "reward_parts": list(self.reward_parts.items())}


def collect_results(
    outputs: GenerateOutputs, tasks: Sequence[Task], success_reward: float, kind_field: str = ""
) -> list[EpisodeResult]:
    """Return one result per trajectory or failure, sorted by trajectory id.

    Args:
        outputs: finished and failed episodes.
        tasks: all planned tasks.
        success_reward: smallest reward of a solved episode.
        kind_field: name of the payload field that holds a task's kind. If empty, all tasks have the kind "all".

    Raises:
        ConfigurationError: a task's payload has no field `kind_field`.
    """
    labels = {task.task_id: (task.split, task_kind(task, kind_field)) for task in tasks}
    finished = [_finished(each, *labels[each.task_id], success_reward) for each in outputs.trajectories]
    failed = [_failed(each, *labels[each.task_id]) for each in outputs.failures]
    return sorted(finished + failed, key=lambda result: result.trajectory_id)


def _finished(trajectory: Trajectory, split: str, kind: str, success_reward: float) -> EpisodeResult:
    defects = Counter(turn.action_defect for turn in trajectory.turns)
    return EpisodeResult(
        trajectory_id=trajectory.trajectory_id,
        task_id=trajectory.task_id,
        split=split,
        kind=kind,
        solved=trajectory.earns(success_reward),
        reward=trajectory.reward,
        reward_parts=trajectory.reward_parts,
        turns=len(trajectory.turns),
        completion_tokens=sum(len(turn.completion_token_ids) for turn in trajectory.turns),
        format_errors=defects["format"],
        inadmissible_actions=defects["inadmissible"],
        truncated=trajectory.truncated,
    )


def _failed(failure: Failure, split: str, kind: str) -> EpisodeResult:
    return EpisodeResult(
        trajectory_id=failure.trajectory_id,
        task_id=failure.task_id,
        split=split,
        kind=kind,
        solved=False,
        failure=failure.reason,
    )


def refuse_unfinished(outputs: GenerateOutputs) -> None:
    """Check that at least one episode was finished.

    Raises:
        ServerError: all episodes failed.
    """
    if outputs.trajectories:
        return
    first = outputs.failures[0]
    raise ServerError(
        f"all {len(outputs.failures)} episodes failed: {outputs.drops}",
        code="no_episode_finished",
        where=f"{first.trajectory_id}: {first.detail}",
        remedy="see the servers' logs; nothing was written",
    )


def write_results(folder: Path, results: Sequence[EpisodeResult]) -> None:
    """Write the results as the table `results.parquet` to `folder`."""
    write_table(folder / RESULTS_FILE, [result.row() for result in results], RESULTS)


def accuracy(results: Sequence[EpisodeResult]) -> Interval:
    """Return the fraction of planned episodes that were solved, with a 95 % interval. Failed episodes count as not
    solved."""
    return clustered_wilson_interval(_by_task(results, lambda result: result.solved))


def mean_reward(results: Sequence[EpisodeResult]) -> Interval:
    """Return the mean reward of the finished episodes, with a 95 % interval."""
    done = [result for result in results if result.reward is not None]
    return mean_interval(_by_task(done, lambda result: float(result.reward or 0.0)))


def metrics(results: Sequence[EpisodeResult], splits: Sequence[str]) -> dict[str, Any]:
    """Return the document for `metrics.json`. The metrics of the first split are at its top level. The metrics of each
    further split are in an object under the split's name."""
    first, *more = (split_metrics(of_split(results, split)) for split in splits)
    return first | dict(zip(splits[1:], more, strict=True))


def describe_failures(results: Sequence[EpisodeResult]) -> str:
    """Describe in one sentence how failed episodes affect the metrics; an empty string if none failed."""
    reasons = Counter(result.failure for result in results if result.failure)
    if not reasons:
        return ""
    listed = ", ".join(f"{count} {reason}" for reason, count in reasons.most_common())
    finished = accuracy([result for result in results if result.failure is None])
    return (
        f"{reasons.total()} of {len(results)} episodes failed ({listed}) and count as not solved: "
        f"accuracy {accuracy(results).estimate:.3f}, of finished ones {finished.estimate:.3f}; "
        "mean rewards are over finished ones"
    )


def of_split(results: Sequence[EpisodeResult], split: str) -> list[EpisodeResult]:
    """Return the results whose task is in `split`."""
    return [result for result in results if result.split == split]


def split_metrics(results: Sequence[EpisodeResult]) -> dict[str, Any]:
    """Return the metrics of one split's results, by name. Metrics that are undefined are left out.

    `accuracy` is over all planned episodes, and failed episodes count as not solved. `accuracy_of_finished` and the
    means of `MEAN_COLUMNS` are over finished episodes only.
    """
    tasks = _by_task(results, lambda result: result.solved)
    done = [result for result in results if result.failure is None]
    solved = [result for result in done if result.solved]
    numbers: dict[str, Any] = {
        **_interval("accuracy", accuracy(results)),
        **_interval("accuracy_of_finished", accuracy(done)),
        **_interval("reward", mean_reward(results)),
        "solved_at_least_once": fmean(any(task) for task in tasks) if tasks else 0.0,
        "tasks": len(tasks),
        "episodes": len(results),
        "failed": len(results) - len(done),
        "failures": dict(sorted(Counter(result.failure for result in results if result.failure).items())),
        "reward_parts": _part_means(done),
        "kinds": {kind: _kind_metrics(group) for kind, group in sorted(by_kind(results).items())},
    }
    if done:
        for name in MEAN_COLUMNS:
            numbers[name] = fmean(getattr(result, name) for result in done)
    if solved:
        numbers["turns_when_solved"] = fmean(result.turns for result in solved)
    return numbers


def _kind_metrics(group: Sequence[EpisodeResult]) -> dict[str, float]:
    done = [result.turns for result in group if result.failure is None]
    turns = {"turns": fmean(done)} if done else {}
    failed = sum(result.failure is not None for result in group)
    return {"episodes": len(group), "failed": failed, **_interval("accuracy", accuracy(group)), **turns}


def _interval(name: str, interval: Interval) -> dict[str, float]:
    values = {name: interval.estimate, f"{name}_low": interval.low, f"{name}_high": interval.high}
    return {key: value for key, value in values.items() if math.isfinite(value)}


def _by_task(results: Sequence[EpisodeResult], value: Callable[[EpisodeResult], ValueT]) -> list[list[ValueT]]:
    """Compute `value` for each result. Return these values in one list per task."""
    clusters: dict[str, list[ValueT]] = defaultdict(list)
    for result in results:
        clusters[result.task_id].append(value(result))
    return list(clusters.values())


def by_kind(results: Sequence[EpisodeResult]) -> dict[str, list[EpisodeResult]]:
    """Return the results in one list per kind of task."""
    kinds: dict[str, list[EpisodeResult]] = defaultdict(list)
    for result in results:
        kinds[result.kind].append(result)
    return kinds


def _part_means(done: Sequence[EpisodeResult]) -> dict[str, float]:
    """Return the mean of each part of the reward over the finished episodes `done`, by the part's name."""
    names = sorted({name for result in done for name in result.reward_parts})
    return {name: fmean(result.reward_parts.get(name, 0.0) for result in done) for name in names}


def planned_tasks(plan: EvaluationSettings, folder: Path) -> list[Task]:
    """Read the tasks that an evaluation plays from the tasks artifact in `folder`. Return them split by split.

    Raises:
        ConfigurationError: a task has no field `plan.kind_field`.
        DataError: the artifact cannot be read.
    """
    tasks = [task for split in plan.splits for task in load_tasks(folder, split)[: plan.max_tasks or None]]
    for task in tasks:
        task_kind(task, plan.kind_field)
    return tasks
