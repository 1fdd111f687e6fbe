"""The page in a real browser: it follows a run, filters, and runs nothing that a model wrote."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from armature.components.artifacts.images import ImageStore
from armature.components.artifacts.videos import decode_video
from armature.components.configuration.stages import STARTED
from tests.browser import NEEDS_CHROMIUM
from tests.models.clips import clip
from tests.viewer.conftest import RUN, Training, viewed

ATTACK = "</script><img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>"

pytestmark = NEEDS_CHROMIUM


@pytest.fixture
def tab(training: Training) -> Iterator[Any]:
    training.step(1, [0.0, 1.0], ["blue", ATTACK])
    with viewed(training.root) as page:
        yield page


def test_index_follows_a_running_training(
    tab: Any, training: Training, record_property: Callable[[str, object], None]
) -> None:
    assert "token" not in tab.url
    assert tab.inner_text("[data-series=reward] b") == "0.5"
    training.step(2, [1.0, 1.0], ["green", "red"])
    written = time.monotonic()
    tab.locator("[data-series=reward] b", has_text="1").wait_for(timeout=10_000)
    record_property("seconds until a step is shown", round(time.monotonic() - written, 2))
    tab.get_by_text("2 of 9").wait_for(timeout=10_000)

    tab.click("[data-tab=rollouts]")
    tab.locator("#list .row").nth(3).wait_for()
    assert tab.locator("#list .row").first.get_attribute("data-step") == "2"
    tab.locator(".tokens").wait_for()
    assert tab.locator(".images img").first.evaluate("image => image.decode().then(() => image.naturalWidth)") == 56
    assert tab.inner_text(".truth") == '{\n "color": "red"\n}'
    tab.fill("#find", "onerror")
    tab.locator("#count", has_text="1 of 4").wait_for()
    tab.locator(".group tr[aria-current=true]", has_text=ATTACK).wait_for()
    assert tab.title() == "Armature: runs"
    assert tab.locator(".group tbody tr").count() == 2
    tab.select_option("#coloring", "ratio")
    assert tab.locator(".tokens span:not(.d4)").count() == 0  # a ratio of e
    assert tab.problems == []
    assert RUN[:12] in tab.url


def test_page_opens_on_the_training_of_a_newer_evaluation(training: Training) -> None:
    training.step(1, [0.0, 1.0], ["blue", "red"])
    os.utime(training.workspace / STARTED, (1, 1))
    training.evaluation("e" * 20, training.root / "train-vlm" / RUN, [1.0])
    with viewed(training.root) as tab:
        assert tab.input_value("#run") == RUN
        assert tab.locator("#run optgroup option").count() == 2
        tab.click("[data-tab=rollouts]")
        tab.locator("#list .thumb").nth(1).wait_for()
        tab.locator(".glance img").wait_for()
        assert tab.locator(".glance img").count() == 1
        assert tab.locator(".glance dd").last.inner_text() in ("blue", "red")
        assert tab.locator(".glance").evaluate("part => part.getBoundingClientRect().bottom") < 720
        assert tab.problems == []


def test_clip_is_shown_with_its_frames(training: Training) -> None:
    video = clip(5, 0.5)
    shown = replace(training, image=ImageStore(training.root / "images").put(video))
    shown.step(1, [1.0])
    with viewed(training.root) as tab:
        tab.click("[data-tab=rollouts]")
        frames = tab.locator(".glance .frames canvas")
        frames.nth(4).wait_for()
        read = "canvas => Array.from(canvas.getContext('2d').getImageData(0, 0, 96, 64).data)"
        for number, frame in enumerate(decode_video(video).frames):
            pixels = np.array(frames.nth(number).evaluate(read)).reshape(64, 96, 4)
            assert np.array_equal(pixels[:, :, :3], np.asarray(frame))
        assert frames.count() == 5 and tab.problems == []


def test_changes_lists_answers_over_the_steps(tab: Any, training: Training) -> None:
    training.heldout(0, [0.0, 0.0], ["blue", "green"])
    training.step(2, [1.0, 1.0], ["green", "red"])
    training.heldout(2, [1.0, 0.0], ["crimson", "pink"])
    tab.click("[data-tab=rollouts]")
    tab.locator("#source option", has_text="held-out tasks").wait_for(state="attached")
    tab.select_option("#source", "heldout")
    tab.locator("#count", has_text="4 of 8").wait_for()
    tab.locator("#list .row", has_text="held-out 2").first.click()
    tab.click("#across")
    shown = tab.locator(".times tbody tr")
    shown.nth(3).wait_for()
    assert [" ".join(row.split()) for row in shown.locator("td:first-child").all_inner_texts()] == [
        "held-out before step 1",
        "training step 1",
        "training step 2",
        "held-out after step 2",
    ]
    shown.nth(1).get_by_text(ATTACK).click()
    tab.locator("#count", has_text="2 of 8").wait_for()
    tab.locator(".group tr[aria-current=true]", has_text=ATTACK).wait_for()

    tab.click("[data-tab=compare]")
    tab.locator("#count", has_text="the second is better on 1").wait_for()
    tab.locator(".pair > div").nth(1).wait_for()
    assert tab.locator(".pair > div").count() == 2
    assert tab.locator(".pair > div").nth(0).locator(".text").all_inner_texts() == ["blue", "green"]
    assert tab.locator(".pair > div").nth(1).locator(".text").all_inner_texts() == ["crimson", "pink"]
    tab.select_option("#second", f"{RUN}:train")
    tab.locator(".pair > div").nth(1).locator(".text", has_text="red").wait_for()
    assert tab.title() == "Armature: runs" and tab.problems == []
