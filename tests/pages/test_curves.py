"""Learning curves and reports: what is drawn, that it repeats, and that it holds no markup of others."""

from __future__ import annotations

import math
import re

from armature.components.pages.report import (
    HtmlReport,
    Table,
    flatten,
    panels_of,
    thinned,
    training_curves,
    write_report,
)
from tests.refusals import refused

HISTORY = [
    {
        "step": step,
        "reward": step / 10,
        "reward/rollout_std": 0.1,
        "mismatch_kl": 10.0**-step,
        "timing/wait_for_rollouts": 1.0,
        "timing/train": 2.0,
        "timing/step": 3.5,
        "timing/evaluation": 0.5,
        "unknown": 1.0,
        **({"heldout/accuracy": 0.5, "heldout/low": 0.4, "heldout/high": 0.6} if step % 4 == 0 else {}),
    }
    for step in range(8)
]


def test_only_charts_with_data_are_drawn():
    assert {panel.title: panel.series for panel in panels_of(HISTORY)} == {
        "Reward of the rollouts": ("reward",),
        "Held-out accuracy": ("heldout/accuracy",),
        "Mismatch KL, trainer against sampler": ("mismatch_kl",),
        "Time of a step": ("timing/evaluation", "timing/train", "timing/wait_for_rollouts"),
    }


def test_long_history_is_thinned_except_evaluations():
    history = [{"step": step} | ({"heldout/accuracy": 0.5} if step == 777 else {}) for step in range(1, 10_001)]
    saved = thinned(history, 1500)
    assert len(saved) <= 1502 and {"step": 777, "heldout/accuracy": 0.5} in saved and saved[-1] == history[-1]
    assert thinned(history[:1500], 1500) == history[:1500]


def test_report_escapes_text_and_is_reproducible(page):
    hostile = "<script>alert(1)</script>"
    report = HtmlReport(
        hostile,
        {hostile: hostile},
        {hostile: "rollouts.html"},
        tables=[Table(hostile, [hostile], [[hostile]])],
        configuration={"trainer": {"objective": {"name": hostile}}},
        curves=[training_curves([{"reward": math.nan, f"failures/{hostile}": 1.0}])],
    )
    write_report(page, report)
    first = page.read_text()
    assert "<script>alert" not in first and "&lt;script&gt;alert" in first
    assert not re.search(r"\d{4}-\d\d-\d\d|https?://(?!www.w3.org/2000/svg)", first)
    write_report(page, report)
    assert page.read_text() == first


def test_rejects_links_that_run_code(page):
    with refused("invalid_link", "link 'x'", page):
        write_report(page, HtmlReport("t", links={"x": "javascript:alert(1)"}))


def test_flattens_nested_metrics():
    assert flatten({"a": {"b": 1, "c": {"d": "x"}}, "e": [1], "f": {}}) == [
        ("a.b", "1"),
        ("a.c.d", '"x"'),
        ("e", "[1]"),
        ("f", "{}"),
    ]
