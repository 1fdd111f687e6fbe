"""Results of an evaluation: tables with one row per planned episode, and success rates per task, suite and overall."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from statistics import fmean
from typing import Any

import pyarrow as pa

from armature.components.artifacts.tables import TableSchema, read_table, write_table
from armature.components.evaluation.wilson import Interval, wilson_interval
from armature.components.robots.evaluation.episode import EpisodeOutcome
from armature.components.robots.evaluation.schedule import EpisodeKey, PlannedEpisode
from armature.components.robots.libero.settings import Perturbation

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
            ("failure", pa.string()),  # why the episode could not be played; null if it was played
        ]
    ),
)
PERTURBED_FILE = "perturbed.parquet"
PERTURBED = TableSchema(
    "libero-perturbed-results",
    1,
    pa.schema([*RESULTS.schema, ("perturbation", pa.string()), ("strength", pa.float64())]),
)


@dataclass(frozen=True)
class LiberoResult:
    """Result of one planned episode. An episode that could not be played has a `failure`, no steps and no success."""

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
    def key(self) -> tuple[str, int, int]:
        """Identity of the episode, without its perturbation."""
        return (self.suite, self.task, self.episode)


@dataclass(frozen=True)
class PerturbedResult(LiberoResult):
    """Result of one planned episode with a perturbation."""

    perturbation: str
    strength: float

    @property
    def label(self) -> str:
        return Perturbation(self.perturbation, self.strength).label


def collect_results(
    planned: Sequence[PlannedEpisode], outcomes: Mapping[EpisodeKey, EpisodeOutcome]
) -> list[LiberoResult]:
    """Return the results of the episodes without perturbation, in planned order."""
    return [LiberoResult(**_fields(each, outcomes[each.key])) for each in planned if each.perturbation is None]


def collect_perturbed(
    planned: Sequence[PlannedEpisode], outcomes: Mapping[EpisodeKey, EpisodeOutcome]
) -> list[PerturbedResult]:
    """Return the results of the episodes with a perturbation, in planned order."""
    return [
        PerturbedResult(**_fields(each, outcomes[each.key]), perturbation=one.name, strength=one.strength)
        for each in planned
        if (one := each.perturbation) is not None
    ]


def _fields(planned: PlannedEpisode, outcome: EpisodeOutcome) -> dict[str, Any]:
    return {
        "suite": planned.task.suite,
        "task": planned.task.index,
        "language": planned.task.language,
        "episode": planned.episode,
        "initial_state": planned.initial_state,
        "simulator_seed": planned.simulator_seed,
        "success": outcome.success,
        "steps": outcome.steps,
        "actions": tuple(map(float, outcome.actions.reshape(-1))),
        "failure": outcome.failure,
    }


def write_results(folder: Path, results: Sequence[LiberoResult], perturbed: Sequence[PerturbedResult] = ()) -> None:
    """Write the table of results. If there are results of perturbed episodes, write them to a second table."""
    write_table(folder / RESULTS_FILE, [vars(result) for result in results], RESULTS)
    if perturbed:
        write_table(folder / PERTURBED_FILE, [vars(result) for result in perturbed], PERTURBED)


def read_results(folder: Path) -> list[LiberoResult]:
    """Read the results of the episodes without perturbation.

    Raises:
        DataError: the folder is not a LIBERO evaluation.
    """
    return [LiberoResult(**row) for row in _rows(folder / RESULTS_FILE, RESULTS)]


def read_perturbed(folder: Path) -> list[PerturbedResult]:
    """Read the results of the perturbed episodes; an empty list if there were no perturbations.

    Raises:
        DataError: the table cannot be read.
    """
    path = folder / PERTURBED_FILE
    return [PerturbedResult(**row) for row in _rows(path, PERTURBED)] if path.is_file() else []


def _rows(path: Path, schema: TableSchema) -> list[dict[str, Any]]:
    return [{**row, "actions": tuple(row["actions"])} for row in read_table(path, schema).to_pylist()]


def success_rate(results: Sequence[LiberoResult]) -> Interval:
    """Return the share of planned episodes that were solved, with Wilson's interval.

    The episodes are trials of fixed tasks: the interval covers other noise and other initial states of these tasks,
    not other tasks.
    """
    return wilson_interval(sum(result.success for result in results), len(results))


def by_suite(results: Sequence[LiberoResult]) -> dict[str, list[LiberoResult]]:
    """Group the results by suite. Results of one suite must be adjacent; their order is kept."""
    return {suite: list(group) for suite, group in groupby(results, lambda result: result.suite)}


def by_task(results: Sequence[LiberoResult]) -> dict[tuple[str, int], list[LiberoResult]]:
    """Group the results by suite and task number. Results of one task must be adjacent."""
    return {key: list(group) for key, group in groupby(results, lambda result: result.key[:2])}


def by_perturbation(results: Sequence[PerturbedResult]) -> dict[str, list[PerturbedResult]]:
    """Group the results by the label of their perturbation. Results of one perturbation must be adjacent."""
    return {label: list(group) for label, group in groupby(results, lambda result: result.label)}


def metrics(results: Sequence[LiberoResult]) -> dict[str, Any]:
    """Return the content of `metrics.json`.

    `suite_mean` is the mean of the suites' success rates, which papers call the average.
    """
    suites = by_suite(results)
    return {
        **numbers(results),
        "suite_mean": fmean(success_rate(group).estimate for group in suites.values()),
        "failures": dict(sorted(Counter(result.failure for result in results if result.failure).items())),
        "suites": {suite: numbers(group) for suite, group in suites.items()},
        "tasks": {f"{suite}/{task}": numbers(group) for (suite, task), group in by_task(results).items()},
    }


def numbers(results: Sequence[LiberoResult]) -> dict[str, float]:
    """Return the success rate of these results with its 95 % interval, and the counts of episodes."""
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


# --- `eval_info.json` in LeRobot's format, for tools that read it ---

EVAL_INFO_FILE = "eval_info.json"

Videos = Mapping[EpisodeKey, str]


def video_path(key: EpisodeKey) -> str:
    """Return the path of an episode's video, relative to the output folder."""
    suite, task, episode, *perturbed = key
    return "/".join(["videos", f"{suite}_{task}", *perturbed, f"eval_episode_{episode}.mp4"])


def eval_info(results: Sequence[LiberoResult], videos: Videos, seconds: float) -> dict[str, Any]:
    """Return the evaluation in LeRobot's format: `per_task`, `per_group` (suites) and `overall`.

    `pc_success` is in percent. LIBERO's reward is 1 for the step that solves the task and 0 for all others, so the sum
    and the maximum over an episode both equal its success.

    Args:
        seconds: duration of the evaluation, without attempts before a resume.
    """
    overall = _aggregate(results, videos) | {"eval_s": seconds, "eval_ep_s": seconds / max(len(results), 1)}
    return {
        "per_task": [
            {"task_group": suite, "task_id": task, "metrics": _per_episode(group, videos)}
            for (suite, task), group in by_task(results).items()
        ],
        "per_group": {suite: _aggregate(group, videos) for suite, group in by_suite(results).items()},
        "overall": overall,
    }


def _per_episode(results: Sequence[LiberoResult], videos: Videos) -> dict[str, Any]:
    rewards = [float(result.success) for result in results]
    return {
        "sum_rewards": rewards,
        "max_rewards": rewards,
        "successes": [result.success for result in results],
        "video_paths": _paths(results, videos),
    }


def _aggregate(results: Sequence[LiberoResult], videos: Videos) -> dict[str, Any]:
    rate = fmean(result.success for result in results)
    return {
        "avg_sum_reward": rate,
        "avg_max_reward": rate,
        "pc_success": 100.0 * rate,
        "n_episodes": len(results),
        "video_paths": _paths(results, videos),
    }


def _paths(results: Sequence[LiberoResult], videos: Videos) -> list[str]:
    return [videos[result.key] for result in results if result.key in videos]
