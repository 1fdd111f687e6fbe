"""Reports of a LIBERO evaluation and of a comparison of two evaluations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from statistics import fmean
from typing import Any

import numpy as np
from numpy.typing import NDArray

from armature.components.contracts.images import data_url
from armature.components.pages.report import HtmlReport, ReportImage, Table
from armature.components.robots.evaluation.compare import PairedComparison, compare_results
from armature.components.robots.evaluation.results import (
    LiberoResult,
    PerturbedResult,
    by_perturbation,
    by_suite,
    by_task,
    success_rate,
)
from armature.components.robots.evaluation.schedule import EpisodeKey

_COLUMNS = ("episodes", "success, 95 % interval", "steps when solved", "failed")
_STILLS = 24


@dataclass(frozen=True)
class LastFrame:
    """Last frame of a filmed episode, uint8 RGB (height, width, 3), and the path of its video."""

    key: EpisodeKey
    result: LiberoResult
    image: NDArray[np.uint8]
    video: str


def evaluation_report(
    results: Sequence[LiberoResult],
    stills: Sequence[LastFrame],
    configuration: Mapping[str, Any],
    links: Mapping[str, str],
    perturbed: Sequence[PerturbedResult] = (),
    title: str = "Evaluation in LIBERO",
) -> HtmlReport:
    """Return the report of an evaluation.

    It has success rates with intervals by suite and task, the same with perturbations, the last frames of the first
    successes and failures, and the episodes that could not be played.
    """
    suites = by_suite(results)
    figures = {"success, 95 % interval": str(success_rate(results))}
    if len(suites) > 1:
        figures["mean of the suites"] = f"{fmean(success_rate(group).estimate for group in suites.values()):.3f}"
    figures |= {
        "tasks": str(len(by_task(results))),
        "episodes": f"{len(results):,}",
        "not played": str(sum(result.failure is not None for result in [*results, *perturbed])),
    }
    videos = {f"video: {_label(still.result)}": still.video for still in stills}
    tables = [_by_suite(suites), _by_perturbation(results, perturbed), _by_task(results)]
    tables.append(_failures([*results, *perturbed]))
    return HtmlReport(
        f"{title}: {', '.join(suites)}",
        figures,
        {**links, **videos},
        images=[_still(still) for still in stills[:_STILLS]],
        tables=[table for table in tables if table.rows],
        configuration=configuration,
    )


def comparison_report(
    parts: Mapping[str, PairedComparison],
    names: tuple[str, str],
    configuration: Mapping[str, Any],
    videos: Mapping[str, str] | None = None,
) -> HtmlReport:
    """Return the report of a comparison: which of two policies solves more of the same episodes.

    Args:
        parts: comparisons by name of the part; the first is "all".
        videos: paths of side-by-side videos by description.
    """
    whole = parts["all"]
    figures = {
        names[0]: f"{(whole.both + whole.only_first) / whole.pairs:.3f}",
        names[1]: f"{(whole.both + whole.only_second) / whole.pairs:.3f}",
        "difference": f"{whole.difference:+.3f}",
        "p, McNemar's exact test": f"{whole.p_value:.3g}",
        "pairs": f"{whole.pairs:,}",
    }
    columns = ["part", "pairs", "both", f"only {names[0]}", f"only {names[1]}", "neither", "difference"]
    rows = [[name, *_paired(part)] for name, part in parts.items()]
    table = Table("The same episodes", [*columns, "unpaired 95 % interval", "p, paired", "p, unpaired"], rows)
    return HtmlReport(
        f"{names[1]} against {names[0]}", figures, videos or {}, tables=[table], configuration=configuration
    )


def _paired(part: PairedComparison) -> list[str]:
    unpaired = part.unpaired
    counts = [part.pairs, part.both, part.only_first, part.only_second, part.neither]
    return [
        *map(str, counts),
        f"{part.difference:+.3f}",
        f"{unpaired.low:+.3f} to {unpaired.high:+.3f}",
        f"{part.p_value:.3g}",
        f"{unpaired.p_value:.3g}",
    ]


def _by_suite(suites: Mapping[str, Sequence[LiberoResult]]) -> Table:
    return Table("By suite", ["suite", *_COLUMNS], [[suite, *_cells(group)] for suite, group in suites.items()])


def _by_task(results: Sequence[LiberoResult]) -> Table:
    rows = [[suite, str(task), group[0].language, *_cells(group)] for (suite, task), group in by_task(results).items()]
    return Table("By task", ["suite", "task", "words", *_COLUMNS], rows)


def _by_perturbation(results: Sequence[LiberoResult], perturbed: Sequence[PerturbedResult]) -> Table:
    """Return a table with one row per perturbation. It compares episodes with and without the perturbation."""
    columns = [
        "perturbation",
        *_COLUMNS,
        "without",
        "difference",
        "solved only without",
        "solved only with",
        "p, paired",
    ]
    rows = []
    for label, group in by_perturbation(perturbed).items():
        pairs = compare_results(results, group)
        without = f"{(pairs.both + pairs.only_first) / pairs.pairs:.3f}"
        compared = [without, f"{pairs.difference:+.3f}", str(pairs.only_first), str(pairs.only_second)]
        rows.append([label, *_cells(group), *compared, f"{pairs.p_value:.3g}"])
    return Table("With perturbations", columns, rows)


def _cells(group: Sequence[LiberoResult]) -> list[object]:
    solved = [result.steps for result in group if result.success]
    failed = sum(result.failure is not None for result in group)
    steps = f"{fmean(solved):.0f}" if solved else ""
    return [str(len(group)), success_rate(group), steps, str(failed)]


def _failures(results: Sequence[LiberoResult]) -> Table:
    rows = [[_label(result), result.failure] for result in results if result.failure]
    return Table("Episodes that could not be played", ["episode", "reason"], rows)


def _label(result: LiberoResult) -> str:
    end = "solved" if result.success else "not solved"
    changed = f", {result.label}" if isinstance(result, PerturbedResult) else ""
    return f"{result.suite} {result.task}, episode {result.episode}{changed}, {end} after {result.steps} steps"


def _still(still: LastFrame) -> ReportImage:
    from PIL import Image

    out = BytesIO()
    Image.fromarray(still.image).save(out, "WEBP", quality=80, method=4)
    return ReportImage(
        _label(still.result), data_url(out.getvalue(), "image/webp"), f"last frame: {still.result.language}"
    )
