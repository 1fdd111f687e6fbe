"""examples/clicks.py: the elements' places and the page itself, clicked in a real browser, agree on what is right."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).resolve().parents[2] / "examples/clicks.py"


@pytest.mark.long
@pytest.mark.skipif(shutil.which("chromedriver") is None, reason="apt-get install chromium chromium-driver")
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
