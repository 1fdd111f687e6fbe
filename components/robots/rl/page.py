"""Tables and curves in the report of a robot policy's reinforcement learning, besides the metric curves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from armature.components.evaluation.wilson import wilson_interval
from armature.components.pages.report import Curves, Panel, Table
from armature.components.robots.rl.table import ActionChunk

_COURSES = {"Mean value along an episode": "value", "Mean log-prob of sampled chunks along an episode": "logprobs"}


def outcome_table(history: Sequence[Mapping[str, float]]) -> Table:
    """Return a table with one row per step: its numbers of solved, truncated and failed episodes, and its success rate.

    Steps whose metrics do not include the success rate and the number of episodes are left out.
    """
    rows = []
    for row in history:
        if "success" in row and "rollouts/planned" in row:
            failed = round(row.get("rollouts/failed", 0))
            played = round(row["rollouts/planned"]) - failed
            solved = round(row["success"] * played)
            counts = [str(round(row["step"])), str(solved), str(played - solved), str(failed)]
            rows.append([*counts, wilson_interval(solved, played)])
    return Table("Episodes by outcome", ["step", "solved", "truncated", "failed", "success, 95 % interval"], rows)


def course_curves(answers: Sequence[ActionChunk]) -> list[Curves]:
    """Return two charts over the chunk's number in its episode: the mean value and the mean log-prob.

    Each chart has one curve for the solved episodes of a step and one for the truncated episodes.
    """
    solved = {each.episode_id for each in answers if each.done and not each.truncated}
    by_place: dict[int, dict[str, list[ActionChunk]]] = {}
    for each in answers:
        outcome = "solved" if each.episode_id in solved else "truncated"
        by_place.setdefault(each.chunk, {}).setdefault(outcome, []).append(each)
    curves = []
    for title, column in _COURSES.items():
        rows = []
        for chunk, groups in sorted(by_place.items()):
            means = {outcome: _mean(group, column) for outcome, group in groups.items()}
            rows.append({"step": float(chunk), **{name: mean for name, mean in means.items() if mean is not None}})
        if any(len(row) > 1 for row in rows):
            curves.append(Curves([Panel(title, ("solved", "truncated"), axis="chunk")], rows))
    return curves


def _mean(answers: Sequence[ActionChunk], column: str) -> float | None:
    values = [getattr(each, column) for each in answers]
    means = [float(np.mean(value)) for value in values if value is not None and np.size(value)]
    return float(np.mean(means)) if means else None
