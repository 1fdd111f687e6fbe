"""The viewer in a real browser: it draws, filters, sorts and moves, and runs nothing that a model wrote."""

from __future__ import annotations

from dataclasses import replace

import pytest

from armature.components.contracts.rollouts import Failure
from armature.components.contracts.tool_calls import CalledTool
from armature.components.pages.report import HtmlReport, Rollouts, Table, training_curves, write_report
from tests.browser import CHROMIUM, NEEDS_CHROMIUM
from tests.pages.conftest import make_trajectory

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
    rollouts = Rollouts(trajectories, [Failure("lost", "b", ATTACK, "timeout", ATTACK)], images, chr)
    curves = [training_curves([{"reward": 0.25, f"failures/{ATTACK}": 1.0}, {"reward": 0.75}])]
    table = Table("Results", ["name", ATTACK], [["all", ATTACK]])
    write_report(page, HtmlReport("Look", {"accuracy": ATTACK}, tables=[table], curves=curves, rollouts=rollouts))
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
    return [row.get_attribute("data-key").split()[-1] for row in tab.query_selector_all("#list .row")]


def search(tab, field: str, text: str, count: str) -> list[str]:
    tab.fill(field, text)
    tab.locator("#count", has_text=count).wait_for()
    return rows(tab)


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [(0.1, 0.95, [0, 0.5, 1]), (0.25, 0.42, [0.2, 0.3, 0.4, 0.5]), (-3, 12, [-5, 0, 5, 10, 15])],
)
def test_axes_have_round_numbers_around_the_values(browser_page, low, high, ticks):
    assert browser_page.evaluate(f"ticksAround({low}, {high})") == pytest.approx(ticks)


def test_page_can_be_browsed(browser_page):
    tab = browser_page
    assert tab.inner_text("[data-series=reward] b") == "0.75"
    assert ATTACK in tab.inner_text("table") and tab.inner_text("dl.tiles dd") == ATTACK
    tab.click("[data-tab=rollouts]")
    tab.locator(".tokens").wait_for()
    assert rows(tab) == ["first", "second", "third"]
    assert tab.evaluate("document.querySelector('.images img').naturalWidth") == 24
    assert not tab.is_visible("#source") and not tab.is_visible("[data-tab=tasks]")
    tab.keyboard.press("ArrowRight")
    assert tab.inner_text("#detail .id") == "colors/second"
    assert tab.inner_text(".tokens").strip() == "blue"
    tab.select_option("#sort", "reward+")
    tab.locator("#list .row >> nth=1", has_text="third").wait_for()
    assert rows(tab) == ["first", "third", "second"]
    assert tab.inner_text("#detail .id") == "colors/first"  # a new order begins at its top
    assert search(tab, "#low", "0.4", "2 of 3") == ["third", "second"]
    assert search(tab, "#find", "BLUE", "1 of 3") == ["second"]
    tab.click("#clear")
    assert search(tab, "#group", "b", "1 of 3") == ["third"]
    assert ATTACK in tab.inner_text(".tokens")
    assert not tab.query_selector(".siblings") and "null" not in tab.inner_text("#detail")
    tab.click("[data-tab=failures]")
    assert ATTACK in tab.inner_text("#table")
    assert tab.title() == "Look"
    assert tab.problems == []
    assert {url.split(":")[0] for url in tab.requests} <= {"file", "data"}


def test_calls_and_their_ends_are_shown(browser_page, page, images):
    calls = (CalledTool("zoom", "ok"), CalledTool("", "malformed"))
    first = make_trajectory(
        "looked", (), completion='<tool_call>\n{"name": "zoom"}\n</tool_call><tool_call>{', group="a"
    )
    last = make_trajectory("looked", (), completion="red", group="a")
    turns = (replace(first.turns[0], tool_calls=calls, reward=0.0), replace(last.turns[0], index=1))
    rollouts = Rollouts([replace(first, turns=turns)], [], images, chr)
    write_report(page, HtmlReport("Look", {}, rollouts=rollouts))
    browser_page.reload()
    browser_page.click("[data-tab=rollouts]")
    browser_page.locator(".tokens").first.wait_for()
    assert "[call]<tool_call>{" in browser_page.inner_text("#list .row")
    bar = browser_page.locator(".turn .bar").first
    assert "called zoom: ok" in bar.inner_text()
    assert bar.locator(".failed").all_inner_texts() == ["called a tool: malformed"]
    assert browser_page.problems == []


def test_report_without_rollouts_has_no_tabs(browser_page, page):
    write_report(page, HtmlReport("Bare", {"episodes": "3"}))
    browser_page.reload()
    assert browser_page.inner_text("dl.tiles").split() == ["episodes", "3"]
    assert not browser_page.is_visible("#tabs") and not browser_page.is_visible("#filters")
    assert browser_page.problems == []
