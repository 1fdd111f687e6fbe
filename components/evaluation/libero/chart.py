"""Rates with their intervals as bars, drawn as SVG that follows the reader's light or dark setting."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape

from armature.components.contracts.images import data_url
from armature.components.evaluation.wilson import Interval
from armature.components.reports.report import ReportImage

_ROW, _LABEL, _BAR, _EDGE = 26, 400, 320, 70
_STYLE = (
    "<style>text{font:12px sans-serif;fill:#33332f}line{stroke:#33332f}"
    "@media(prefers-color-scheme:dark){text{fill:#d5d5d0}line{stroke:#d5d5d0}}</style>"
)


def rate_chart(title: str, rates: Mapping[str, Interval]) -> ReportImage:
    """One bar from 0 to 1 for each rate, its confidence interval as a line."""
    rows = "".join(_row(place, label, rate) for place, (label, rate) in enumerate(rates.items()))
    width, height = _LABEL + _BAR + _EDGE, _ROW * len(rates)
    svg = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">'
        f"{_STYLE}{rows}</svg>"
    )
    words = "; ".join(f"{label}: {rate}" for label, rate in rates.items())
    return ReportImage(title, data_url(svg.encode(), "image/svg+xml"), words)


def _row(place: int, label: str, rate: Interval) -> str:
    middle = place * _ROW + _ROW / 2
    low, high = (_LABEL + _BAR * value for value in (rate.low, rate.high))
    shown = label if len(label) <= 58 else f"{label[:57]}…"
    return (
        f'<text x="{_LABEL - 8}" y="{middle + 4}" text-anchor="end">{escape(shown)}</text>'
        f'<rect x="{_LABEL}" y="{middle - 8}" width="{_BAR}" height="16" fill="#7d7d7d" opacity="0.15"/>'
        f'<rect x="{_LABEL}" y="{middle - 8}" width="{_BAR * rate.estimate:.1f}" height="16" fill="#3f7fc1"/>'
        f'<line x1="{low:.1f}" x2="{high:.1f}" y1="{middle}" y2="{middle}" stroke-width="2"/>'
        f'<text x="{_LABEL + _BAR + 8}" y="{middle + 4}">{rate.estimate:.1%}</text>'
    )
