"""An evaluation as a page."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from components.evaluation.results import Result, accuracy, mean_reward, metrics
from components.evaluation.wilson import Interval
from components.reports.report import Report, Table


def evaluation_report(
    title: str, results: Sequence[Result], configuration: Mapping[str, Any], links: Mapping[str, str]
) -> Report:
    """Accuracy and reward with 95 % intervals, by kind of task and by reward part, and failures by reason."""
    numbers = metrics(results)
    figures = {
        "accuracy, 95 % interval": str(accuracy(results)),
        "mean reward, 95 % interval": str(mean_reward(results)),
        "tasks": f"{numbers['tasks']:,}",
        "episodes": f"{numbers['episodes']:,}",
        "failed": f"{numbers['failed']:,}",
    }
    tables = [_kinds(results), _parts(numbers["reward_parts"]), _failures(results)]
    return Report(title, figures, links, tables=[table for table in tables if table], configuration=configuration)


def _kinds(results: Sequence[Result]) -> Table | None:
    kinds = sorted({result.kind for result in results})
    if len(kinds) < 2:
        return None
    rows = []
    for kind in kinds:
        group = [result for result in results if result.kind == kind]
        rows.append([kind, str(len(group)), *_cells(accuracy(group)), f"{mean_reward(group).estimate:.3f}"])
    return Table("By kind of task", ["kind", "episodes", "accuracy", "95 % interval", "mean reward"], rows)


def _cells(interval: Interval) -> list[str]:
    return [f"{interval.estimate:.3f}", f"{interval.low:.3f} to {interval.high:.3f}"]


def _parts(parts: Mapping[str, float]) -> Table | None:
    rows = [[name, f"{value:.4f}"] for name, value in parts.items()]
    return Table("Reward by part", ["part", "mean"], rows) if rows else None


def _failures(results: Sequence[Result]) -> Table | None:
    reasons = Counter(result.failure for result in results if result.failure)
    rows = [[reason, str(count)] for reason, count in reasons.most_common()]
    return Table("Episodes that could not be finished", ["reason", "count"], rows) if rows else None
