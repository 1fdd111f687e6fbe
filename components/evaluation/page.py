"""An evaluation as a page."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from armature.components.evaluation.results import (
    EpisodeResult,
    accuracy,
    by_kind,
    mean_reward,
    of_split,
    split_metrics,
)
from armature.components.reports.report import HtmlReport, Rollouts, Table

COLUMNS = ("episodes", "failed", "accuracy, 95 % interval", "mean reward", "mean turns")
PER_EPISODE = {
    "turns": "turns per episode",
    "turns_when_solved": "turns when solved",
    "format_errors": "unreadable answers per episode",
    "inadmissible_actions": "inadmissible actions per episode",
}


def evaluation_report(
    title: str,
    results: Sequence[EpisodeResult],
    splits: Sequence[str],
    configuration: Mapping[str, Any],
    rollouts: Rollouts,
) -> HtmlReport:
    """Accuracy and reward with 95 % intervals, by split, kind of task and reward part, and failures by reason.

    What has no split beside it is of the first of `splits`.
    """
    first = of_split(results, splits[0])
    numbers = split_metrics(first)
    figures = {
        "accuracy, 95 % interval": str(accuracy(first)),
        "mean reward, 95 % interval": str(mean_reward(first)),
        "tasks": f"{numbers['tasks']:,}",
        "episodes": f"{numbers['episodes']:,}",
        "failed, counted as not solved": f"{numbers['failed']:,}",
    }
    if numbers["failed"] and numbers["failed"] < numbers["episodes"]:
        figures["accuracy of finished episodes"] = f"{numbers['accuracy_of_finished']:.3f}"
    figures |= {label: f"{numbers[key]:.2f}" for key, label in PER_EPISODE.items() if numbers.get(key)}
    tables = [_splits(results, splits), *(_kinds(results, split, splits) for split in splits)]
    tables += [_parts(numbers["reward_parts"]), _failures(results)]
    return HtmlReport(
        title,
        figures,
        tables=[table for table in tables if table],
        configuration=configuration,
        rollouts=rollouts,
    )


def _splits(results: Sequence[EpisodeResult], splits: Sequence[str]) -> Table | None:
    if len(splits) < 2:
        return None
    rows = [_row(split, of_split(results, split)) for split in splits]
    return Table("By split", ["split", *COLUMNS], rows)


def _kinds(results: Sequence[EpisodeResult], split: str, splits: Sequence[str]) -> Table | None:
    kinds = by_kind(of_split(results, split))
    if len(kinds) < 2:
        return None
    title = "By kind of task" if len(splits) == 1 else f"By kind of task, {split}"
    return Table(title, ["kind", *COLUMNS], [_row(kind, group) for kind, group in sorted(kinds.items())])


def _row(name: str, group: Sequence[EpisodeResult]) -> list[object]:
    """Cells under a name and `COLUMNS`."""
    done = [result.turns for result in group if result.failure is None]
    turns = f"{fmean(done):.1f}" if done else ""
    failed = str(len(group) - len(done))
    return [name, str(len(group)), failed, accuracy(group), f"{mean_reward(group).estimate:.3f}", turns]


def _parts(parts: Mapping[str, float]) -> Table | None:
    rows = [[name, f"{value:.4f}"] for name, value in parts.items()]
    return Table("Reward by part", ["part", "mean"], rows) if rows else None


def _failures(results: Sequence[EpisodeResult]) -> Table | None:
    reasons = Counter(result.failure for result in results if result.failure)
    rows = [[reason, str(count)] for reason, count in reasons.most_common()]
    return Table("Episodes that could not be finished", ["reason", "count"], rows) if rows else None
