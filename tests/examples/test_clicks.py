"""Pages of examples/clicks.py and click_pages.py: elements' places and real clicks agree on what is right."""

from __future__ import annotations

import importlib
import importlib.util
import shutil
from pathlib import Path

import pytest

from armature.components.rewards.boxes import PointInBox, PointInBoxSettings, read_point
from armature.components.rewards.reward import RewardInput

EXAMPLE = Path(__file__).resolve().parents[2] / "examples/clicks.py"


in_a_browser = pytest.mark.skipif(
    shutil.which("chromedriver") is None, reason="apt-get install chromium chromium-driver"
)


@pytest.mark.long
@in_a_browser
@pytest.mark.parametrize("task", ["click-test", "focus-text", "click-dialog"])
def test_places_agree_with_clicks(task: str) -> None:
    spec = importlib.util.spec_from_file_location("clicks", EXAMPLE)
    assert spec is not None and spec.loader is not None
    clicks = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(clicks)
    places, page = clicks.Clicks(task), clicks.Clicks(task, live=True)
    right = total = 0
    try:
        for seed in range(12):
            assert places.reset(seed=seed)[0] == page.reset(seed=seed)[0]
            for cell in range(seed % 5, clicks.COLUMNS * clicks.ROWS, 5):
                reward = page.step(cell)[1]
                assert places.step(cell)[1] == reward, (seed, cell)
                right, total = right + int(reward), total + 1
    finally:
        clicks.browser(task).close()
    assert 0 < right < total / 2


@pytest.mark.long
@in_a_browser
@pytest.mark.parametrize(
    "task", ["click-color", "count-sides", "identify-shape", "focus-text", "click-dialog", "click-test"]
)
def test_boxes_of_a_table_agree_with_clicks(task: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(EXAMPLE.parent)
    pages = importlib.import_module("click_pages")
    reward = PointInBox(PointInBoxSettings(name="point_in_box", units="percent"), EXAMPLE.parent)
    right = total = 0
    try:
        for seed in range(8):
            row = pages.row(task, seed)
            center = read_point(row["demonstration"])
            assert center is not None
            for x, y in [center, *((x, y) for x in range(5, 100, 30) for y in range(seed, 100, 16))]:
                verdict = pages.click(task, seed, pages.pixels(x, y))
                assert reward.grade(RewardInput(f"({x}, {y})", row["box"], row)) == verdict, (seed, x, y)
                right, total = right + int(verdict), total + 1
    finally:
        pages.browser(task).close()
    assert 8 <= right < total / 2
