"""The report of a training run: curves, last numbers, what was dropped, and the configuration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from armature.components.reports.curves import History, curve_images, curves_png
from armature.components.reports.report import HtmlReport, ReportImage, Table, write_report

REPORT_FILE = "report.html"
CURVES_FILE = "curves.png"
_SHOWN = {"reward": "reward", "entropy": "entropy", "importance_ratio": "mean ratio"}


def write_training_report(
    folder: Path,
    *,
    title: str,
    history: History,
    configuration: Mapping[str, Any],
    figures: Mapping[str, str] | None = None,
    links: Mapping[str, str] | None = None,
    tables: Sequence[Table] = (),
    images: Sequence[ReportImage] = (),
) -> None:
    """Writes `report.html` and `curves.png` into `folder`; the same run gives the same bytes.

    Args:
        figures: more numbers for the head of the page, such as held-out accuracy with its interval.
        links: labels and addresses, relative to `folder` or on the web.
        tables: what else is counted; those without rows are left out.
        images: what is shown after the curves.
    """
    drops = [[name, f"{count:,}"] for name, count in drops_by_reason(history).items()]
    left_out = [Table("Left out, by reason", ["reason", "count"], drops)]
    report = HtmlReport(
        title,
        {**(figures or {}), **last_figures(history)},
        links or {},
        [*curve_images(history), *images],
        [table for table in (*tables, *left_out) if table.rows],
        configuration,
    )
    (folder / CURVES_FILE).write_bytes(curves_png(history, title))
    write_report(folder / REPORT_FILE, report)


def last_figures(history: History) -> dict[str, str]:
    """Means over the last tenth of the steps, the largest mismatch KL, and how many rollouts were made."""
    if not history:
        return {}
    tail = history[-max(1, len(history) // 10) :]
    figures = {"steps": str(int(history[-1].get("step", len(history))))}
    for key, label in _SHOWN.items():
        values = [row[key] for row in tail if key in row]
        if values:
            figures[f"{label}, last {len(tail)} steps"] = f"{sum(values) / len(values):.4g}"
    kls = [row["mismatch_kl/first_update"] for row in history if "mismatch_kl/first_update" in row]
    if kls:
        figures["mismatch KL, largest"] = f"{max(kls):.2g}"
    planned, failed = _total(history, "rollouts/planned"), _total(history, "rollouts/failed")
    if planned:
        figures["rollouts"] = f"{planned:,}" + (f", {failed:,} failed" if failed else "")
    return figures


def drops_by_reason(history: History) -> dict[str, int]:
    """Failed rollouts and dropped samples over the whole run, largest first."""
    names = {name for row in history for name in row if name.startswith(("failures/", "drops/"))}
    totals = {name: _total(history, name) for name in names}
    return dict(sorted(totals.items(), key=lambda item: (-item[1], item[0])))


def _total(history: History, key: str) -> int:
    return int(sum(row.get(key, 0) for row in history))
