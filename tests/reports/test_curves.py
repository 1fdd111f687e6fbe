"""Learning curves and reports: what is drawn, that it repeats, and that it holds no markup of others."""

from __future__ import annotations

import base64
import io
import math
import re
import xml.etree.ElementTree as ElementTree

import pytest
from PIL import Image

from armature.components.reports.curves import curve_images, curves_png, panels_of
from armature.components.reports.report import HtmlReport, Table, flatten, write_report
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


def test_only_panels_with_data_are_drawn():
    found = {panel.title: names for panel, names in panels_of(HISTORY)}
    assert found == {
        "Reward of the rollouts": ["reward"],
        "Held-out accuracy": ["heldout/accuracy"],
        "Mismatch KL, trainer against sampler": ["mismatch_kl"],
        "Time of a step": ["timing/evaluation", "timing/train", "timing/wait_for_rollouts"],
    }


def test_the_png_repeats_byte_for_byte():
    first, second = curves_png(HISTORY, "t"), curves_png(HISTORY, "t")
    assert first == second
    assert Image.open(io.BytesIO(first)).size[0] > 800


def test_images_are_svg_in_the_readers_ink():
    images = curve_images(HISTORY)
    assert images == curve_images(HISTORY)
    svg = base64.b64decode(images[0].uri.partition(",")[2]).decode()
    ElementTree.fromstring(svg)
    assert "currentColor" in svg and "#010203" not in svg
    assert images[0].description == "reward from 0 to 0.7"


@pytest.mark.parametrize(
    "history",
    [
        [],
        [{"step": 0}],
        [{"reward": math.nan, "reward/rollout_std": math.nan, "mismatch_kl": 0.0}],
        [{"step": 3, "reward": 1.0}],
    ],
)
def test_thin_histories_are_drawn(history):
    assert curves_png(history).startswith(b"\x89PNG")
    curve_images(history)


def test_report_escapes_and_repeats(page):
    hostile = "<script>alert(1)</script>"
    report = HtmlReport(
        hostile,
        {hostile: hostile},
        {hostile: "rollouts.html"},
        curve_images(HISTORY[:2]),
        [Table(hostile, [hostile], [[hostile]])],
        {"trainer": {"objective": {"name": hostile}}},
    )
    write_report(page, report)
    first = page.read_text()
    assert "<script>alert" not in first and "&lt;script&gt;alert" in first
    assert not re.search(r"\d{4}-\d\d-\d\d|https?:", first)
    write_report(page, report)
    assert page.read_text() == first


def test_links_that_run_code_are_refused(page):
    with refused("invalid_link", "link 'x'", page):
        write_report(page, HtmlReport("t", links={"x": "javascript:alert(1)"}))


def test_flatten():
    assert flatten({"a": {"b": 1, "c": {"d": "x"}}, "e": [1], "f": {}}) == [
        ("a.b", "1"),
        ("a.c.d", '"x"'),
        ("e", "[1]"),
        ("f", "{}"),
    ]
