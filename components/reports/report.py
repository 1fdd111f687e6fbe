"""A report: figures, images, tables and the configuration of one run, as one offline page."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from armature.components.contracts.errors import DataError
from armature.components.reports.pages import write_page


@dataclass(frozen=True)
class ReportImage:
    """`uri` is a data URI; `description` says in words what it shows."""

    title: str
    uri: str
    description: str


@dataclass(frozen=True)
class Table:
    """Cells are text; numbers come formatted."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True)
class HtmlReport:
    """What the page shows, from top to bottom. `links` maps labels to relative or web addresses."""

    title: str
    figures: Mapping[str, str] = field(default_factory=dict)
    links: Mapping[str, str] = field(default_factory=dict)
    images: Sequence[ReportImage] = ()
    tables: Sequence[Table] = ()
    configuration: Mapping[str, Any] = field(default_factory=dict)


def write_report(path: Path, report: HtmlReport) -> None:
    """Writes the page; the same report gives the same bytes.

    Raises:
        DataError: a link is neither relative nor a web address.
    """
    for label, address in report.links.items():
        if urlsplit(address).scheme not in ("", "http", "https"):
            raise DataError(f"not a link: {address!r}", code="invalid_link", where=f"link {label!r} of {path}")
    values = {"report": report, "configuration": flatten(report.configuration)}
    write_page(path, "report.html", styles=("page.css", "report.css"), scripts=(), values=values)


def flatten(values: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """Nested settings as (dotted name, JSON value) in their order."""
    rows: list[tuple[str, str]] = []
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            rows += flatten(value, f"{prefix}{name}.")
        else:
            rows.append((f"{prefix}{name}", json.dumps(value, ensure_ascii=False, default=str)))
    return rows
