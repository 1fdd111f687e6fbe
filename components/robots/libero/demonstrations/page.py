"""Demonstrations as a page: how many reached their goal, and what they look like."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from armature.components.contracts.images import data_url
from armature.components.pages.report import HtmlReport, ReportImage, Table
from armature.components.robots.libero.demonstrations.episodes import DemonstrationJob
from armature.components.robots.libero.scripted.policy import DemonstrationOutcome

STILLS, SIDE = 6, 128


@dataclass(frozen=True)
class Preview:
    """A task's first episode: images (frames, height, width, 3) by camera, and the address of a video, if any."""

    title: str
    images: Sequence[NDArray[np.uint8]]
    film: str | None


def demonstrations_report(
    outcomes: Mapping[DemonstrationJob, DemonstrationOutcome], previews: Sequence[Preview], settings: dict[str, Any]
) -> HtmlReport:
    reached = [outcome for outcome in outcomes.values() if outcome.success]
    figures = {
        "episodes": f"{len(reached):,}",
        "goal not reached": f"{len(outcomes) - len(reached):,}",
        "frames": f"{sum(outcome.steps for outcome in reached):,}",
        "steps per episode": f"{fmean(outcome.steps for outcome in reached):.1f}",
    }
    columns = ["task", "episodes", "reached", "steps", "grasped again"]
    groups: dict[str, list[DemonstrationOutcome]] = {}
    for job, outcome in outcomes.items():
        groups.setdefault(f"{job.task.index}: {job.task.language}", []).append(outcome)
    table = Table("By task", columns, [_row(name, group) for name, group in groups.items()])
    links = {f"Video: {preview.title}": preview.film for preview in previews if preview.film}
    stills = [ReportImage(preview.title, _stills(preview), "from the first frame to the last") for preview in previews]
    return HtmlReport("Demonstrations", figures, links, stills, [table], settings)


def _row(name: str, outcomes: Sequence[DemonstrationOutcome]) -> list[str]:
    steps = [outcome.steps for outcome in outcomes if outcome.success]
    spread = f"{min(steps)} to {max(steps)}" if steps else ""
    again = sum(outcome.retries for outcome in outcomes)
    return [name, str(len(outcomes)), str(len(steps)), spread, str(again)]


def _stills(preview: Preview) -> str:
    """A row of moments per camera."""
    moments = np.linspace(0, len(preview.images[0]) - 1, STILLS).round().astype(int)
    sheet = Image.new("RGB", (SIDE * STILLS, SIDE * len(preview.images)))
    for row, images in enumerate(preview.images):
        for column, moment in enumerate(moments):
            still = Image.fromarray(images[moment]).resize((SIDE, SIDE), Image.Resampling.BILINEAR)
            sheet.paste(still, (SIDE * column, SIDE * row))
    out = io.BytesIO()
    sheet.save(out, "JPEG", quality=85)
    return data_url(out.getvalue(), "image/jpeg")
