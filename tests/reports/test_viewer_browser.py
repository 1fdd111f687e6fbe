"""The viewer in a real browser: it draws, filters, sorts and moves, and runs nothing that a model wrote."""

from __future__ import annotations

import pytest

from armature.components.contracts.rollouts import Failure
from armature.components.reports.viewer import Rollouts, write_viewer
from tests.browser import CHROMIUM, NEEDS_CHROMIUM
from tests.reports.conftest import make_trajectory

ATTACK = "</script><img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>"

pytestmark = NEEDS_CHROMIUM


@pytest.fixture
def browser_page(page, images):
    from playwright.sync_api import sync_playwright

    ref = images.put(24, 24, 0)
    trajectories = [
        make_trajectory("first", (ref,), reward=0.0, group="a"),
        make_trajectory("second", (ref,), reward=1.0, group="a", completion="blue"),
        make_trajectory("third", (), reward=0.5, group="b", completion=ATTACK, prompt=ATTACK),
    ]
    rollouts = Rollouts(trajectories, [Failure("lost", "b", ATTACK, "timeout", ATTACK)])
    write_viewer(page, rollouts, images=images, decode=chr, title="Look")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        tab = browser.new_page()
        tab.problems, tab.requests = [], []
        tab.on("console", lambda message: tab.problems.append(message.text))
        tab.on("pageerror", lambda error: tab.problems.append(str(error)))
        tab.on("request", lambda request: tab.requests.append(request.url))
        tab.goto(page.as_uri())
        yield tab
        browser.close()


def rows(tab) -> list[str]:
    return [row.get_attribute("data-trajectory") for row in tab.query_selector_all("#list .row")]


def test_browsing(browser_page):
    tab = browser_page
    assert rows(tab) == ["first", "second", "third"]
    assert tab.evaluate("document.querySelector('.images img').naturalWidth") == 24
    assert not tab.is_visible("#step")  # nothing to choose from
    tab.keyboard.press("ArrowRight")
    assert tab.inner_text("#detail .id") == "colors/second"
    assert tab.inner_text(".tokens").strip() == "blue"
    tab.select_option("#sort", "reward+")
    assert rows(tab) == ["first", "third", "second"]
    assert tab.inner_text("#detail .id") == "colors/first"  # a new order begins at its top
    tab.fill("#low", "0.4")
    assert rows(tab) == ["third", "second"] and tab.inner_text("#count") == "2 of 3"
    tab.fill("#find", "BLUE")
    assert rows(tab) == ["second"]
    tab.click("#clear")
    tab.locator("#list .row").nth(2).wait_for()
    tab.select_option("#group", "b")
    assert rows(tab) == ["third"]
    assert ATTACK in tab.inner_text(".tokens")
    assert not tab.query_selector(".siblings") and "null" not in tab.inner_text("#detail")
    tab.click("#clear")
    tab.select_option("#task", "failures")
    assert ATTACK in tab.inner_text("#detail")
    assert tab.title() == "Look"
    assert tab.problems == []
    assert {url.split(":")[0] for url in tab.requests} <= {"file", "data"}
