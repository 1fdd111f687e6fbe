"""The report of a training run: curves, final figures, dropped samples by reason, and the configuration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from markupsafe import escape

from armature.components.contracts.metrics import last_tenth
from armature.components.pages.report import Curves, History, HtmlReport, Rollouts, Table, training_curves, write_report

REPORT_FILE = "report.html"
_SHOWN = {"reward": "reward", "entropy": "entropy", "importance_ratio": "mean ratio"}


def write_training_report(
    folder: Path,
    *,
    title: str,
    history: History,
    configuration: Mapping[str, Any],
    figures: Mapping[str, str] | None = None,
    tables: Sequence[Table] = (),
    curves: Sequence[Curves] = (),
    rollouts: Rollouts | None = None,
) -> None:
    """Write `report.html` into `folder`. Equal runs give equal bytes.

    Args:
        figures: additional key figures, such as held-out accuracy with its interval.
        tables: additional tables; empty ones are omitted.
        curves: charts to show after the charts of the history.
        rollouts: rollouts to browse on the page.
    """
    drops = [[name, f"{count:,}"] for name, count in drops_by_reason(history).items()]
    report = HtmlReport(
        title,
        {**(figures or {}), **last_figures(history)},
        tables=[table for table in (*tables, Table("Left out, by reason", ["reason", "count"], drops)) if table.rows],
        configuration=configuration,
        curves=[training_curves(history), *curves],
        rollouts=rollouts,
    )
    write_report(folder / REPORT_FILE, report)


def with_figures(page: str, figures: Mapping[str, str]) -> str:
    """Return the text of a training's `report.html` with further key figures in front, for example those of evaluations
    after the training. A figure that the page has already stays as it is."""
    tiles = '<dl class="tiles">\n'
    new = {name: value for name, value in figures.items() if f"<dt>{escape(name)}</dt>" not in page}
    added = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>\n" for name, value in new.items())
    return page.replace(tiles, tiles + added, 1)


def last_figures(history: History) -> dict[str, str]:
    """Return the key figures of a training by label: the number of steps, means over the last tenth of the steps, the
    largest mismatch KL, and the number of rollouts."""
    if not history:
        return {}
    count, means = max(1, len(history) // 10), last_tenth(history, _SHOWN)
    figures = {"steps": str(int(history[-1].get("step", len(history))))}
    figures |= {f"{_SHOWN[key]}, last {count} steps": f"{mean:.4g}" for key, mean in means.items()}
    kls = [row["mismatch_kl/first_update"] for row in history if "mismatch_kl/first_update" in row]
    if kls:
        figures["mismatch KL, largest"] = f"{max(kls):.2g}"
    planned, failed = _total(history, "rollouts/planned"), _total(history, "rollouts/failed")
    if planned:
        figures["rollouts"] = f"{planned:,}" + (f", {failed:,} failed" if failed else "")
    return figures


def drops_by_reason(history: History) -> dict[str, int]:
    """Return the numbers of failed rollouts and dropped samples in the whole run, by reason. The largest number comes
    first."""
    names = {name for row in history for name in row if name.startswith(("failures/", "drops/"))}
    totals = {name: _total(history, name) for name in names}
    return dict(sorted(totals.items(), key=lambda item: (-item[1], item[0])))


def _total(history: History, key: str) -> int:
    return int(sum(row.get(key, 0) for row in history))
