"""Prefect's pages in a real browser: fill and submit a form, read a run's table."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import httpx

from tests.browser import CHROMIUM

LABEL = "//span[contains(@class,'schema-form-property__label') and normalize-space()='{}']"
PROPERTY = "/ancestor::div[contains(concat(' ',@class,' '),' schema-form-property ')][1]"


@contextmanager
def chromium(dashboard: str, auth_string: str) -> Iterator[Any]:
    """Open Prefect's dashboard in a browser, enter the password, and yield the browser's session."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        session = browser.new_context(viewport={"width": 1400, "height": 1600})
        page = open_page(session, dashboard)
        page.locator("input[type=password]").fill(auth_string)
        page.keyboard.press("Enter")
        page.locator("input[type=password]").wait_for(state="detached")
        yield session
        browser.close()


def open_page(browser: Any, url: str) -> Any:
    page = browser.new_page()
    page.set_default_timeout(120_000)
    page.goto(url, wait_until="domcontentloaded")
    return page


def fill_list(page: Any, label: str, values: list[str], control: str) -> None:
    """Fill the list called `label` in a form with exactly these values."""
    box = page.locator(f"xpath={LABEL.format(label)}{PROPERTY}").first
    while box.locator(control).count() < len(values):
        box.get_by_text("Add item").click()
        page.wait_for_timeout(300)
    for index, value in enumerate(values):
        box.locator(control).nth(index).fill(value)
    assert box.locator(control).count() == len(values)


def start_from_the_form(
    browser: Any, api: httpx.Client, dashboard: str, checkpoints: list[str], seeds: list[str]
) -> dict[str, Any]:
    """Fill and submit the custom-run form of evaluate/sweep, and return the flow run that it started.

    The form ignores a click that comes before it has read the typed values, so a click without effect is repeated. A
    click that Prefect's API answers with 503, because its database is locked, is repeated too.
    """
    from playwright.sync_api import TimeoutError as NoAnswer

    deployment = api.get("/deployments/name/evaluate/sweep").json()["id"]
    page = open_page(browser, f"{dashboard}/deployments/deployment/{deployment}/run")
    page.locator(f"xpath={LABEL.format('Checkpoints')}").first.wait_for()
    fill_list(page, "Checkpoints", checkpoints, "textarea")
    fill_list(page, "Seeds", seeds, "input")
    for _ in range(3):
        with suppress(NoAnswer):
            with page.expect_response(lambda answer: "create_flow_run" in answer.url, timeout=60_000) as created:
                page.get_by_role("button", name="Submit").click()
            if created.value.status == 503:
                continue
            started: dict[str, Any] = created.value.json()
            assert created.value.status == 201, started
            return started
    raise AssertionError(f"the form starts nothing:\n{page.inner_text('body')}")


def table_of_results(browser: Any, dashboard: str, run_id: str) -> str:
    """Return the text of the page with the results table of a flow run."""
    page = open_page(browser, f"{dashboard}/runs/flow-run/{run_id}")
    page.get_by_text("Artifacts", exact=True).last.click()
    page.get_by_text("results", exact=True).first.click()
    page.get_by_text("accuracy_low").first.wait_for()
    text: str = page.inner_text("body")
    return text
