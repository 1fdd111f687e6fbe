"""Report of a robot policy's reinforcement learning, compared with numbers computed by hand."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from armature.components.evaluation.wilson import wilson_interval
from armature.components.robots.rl.page import course_curves, outcome_table
from armature.components.robots.rl.settings import TrainVLARLSettings
from armature.components.robots.rl.stage import write_pages
from tests.robots.rl.kitchen import rollout_settings
from tests.robots.rl.test_batch import answers

HISTORY = [
    {"step": 1, "reward": 0.4, "success": 0.25, "rollouts/planned": 8.0},
    {"step": 2, "reward": 0.9, "success": 1.0, "rollouts/planned": 8.0, "rollouts/failed": 2.0},
]
EPISODES = [replace(each, value=1.0 - each.chunk / 4) for each in answers("a", (1, 1.0), (2, 0.0), (2, 0.0))]


def test_outcome_table_counts_episodes_by_step() -> None:
    assert outcome_table(HISTORY).rows == [
        ["1", "2", "6", "0", wilson_interval(2, 8)],
        ["2", "6", "0", "2", wilson_interval(6, 6)],
    ]
    assert outcome_table([{"step": 1, "reward": 0.5}]).rows == []


def test_course_curves_by_outcome() -> None:
    values, logprobs = course_curves(EPISODES)
    assert values.rows == [{"step": 0, "solved": 1, "truncated": 1}, {"step": 1, "truncated": 0.75}]
    means = [sum(each.logprobs.mean() for each in EPISODES[1:] if each.chunk == chunk) / 2 for chunk in (0, 1)]
    assert [row["truncated"] for row in logprobs.rows] == pytest.approx(means)
    (only,) = course_curves(answers("a", (1, 1.0)))
    assert only.panels[0].title.startswith("Mean log-prob")


def test_report_shows_outcomes_and_curves(tmp_path: Path) -> None:
    sections = {
        "simulator": {},
        "rollouts": rollout_settings().model_dump(),
        "trainer": {"max_steps": 2, "micro_batch_size": 1},
        "preflight": {},
    }
    write_pages(tmp_path, TrainVLARLSettings.model_validate(json.loads(json.dumps(sections))), HISTORY, EPISODES)
    page = (tmp_path / "report.html").read_text()
    for shown in (
        "Episodes by outcome",
        "Mean value along an episode",
        "Success of the rollouts",
        "0.250 [0.071, 0.591]",
    ):
        assert shown in page
    assert wilson_interval(2, 8).low == pytest.approx(0.0715, abs=1e-4)


def test_report_counts_skipped_optimizer_steps(tmp_path: Path) -> None:
    sections = {
        "simulator": {},
        "rollouts": rollout_settings().model_dump(),
        "trainer": {"max_steps": 2, "micro_batch_size": 1},
        "preflight": {},
    }
    history = [row | {"updates_skipped": 2.0} for row in HISTORY]
    write_pages(tmp_path, TrainVLARLSettings.model_validate(json.loads(json.dumps(sections))), history, EPISODES)
    page = (tmp_path / "report.html").read_text()
    assert re.search(r"optimizer steps skipped, gradient not finite.{0,80}\b4\b", page, re.S)
