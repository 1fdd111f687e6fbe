"""Show a person's way: a sweep started from the dashboard's form in a real browser, its results on the run's page."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from armature import deployments
from armature.services import free_port

REPOSITORY = Path(__file__).resolve().parents[2]
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
LABEL = "//span[contains(@class,'schema-form-property__label') and normalize-space()='{}']"
PROPERTY = "/ancestor::div[contains(concat(' ',@class,' '),' schema-form-property ')][1]"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.browser,
    pytest.mark.timeout(1500),
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on PATH; on Debian: apt-get install chromium"),
]


def small_deployments() -> str:
    """prefect.yaml with the recipes' values but fewer tasks and a briefer preparation of the tiny model."""
    document = deployments.document()
    document["deployments"] = [each for each in document["deployments"] if each["name"] == "sweep"]
    parameters = document["deployments"][0]["parameters"]
    parameters["evaluation"]["max_tasks"] = 8
    parameters["model"]["tiny"]["format"]["steps"] = 2
    return yaml.safe_dump(document, sort_keys=False)


@pytest.fixture
def platform(tmp_path: Path) -> Iterator[str]:
    """`armature up` in a folder of its own; yields the dashboard's address."""
    for name in ("flows", ".venv-vllm"):
        (tmp_path / name).symlink_to(REPOSITORY / name)
    (tmp_path / "prefect.yaml").write_text(small_deployments())
    port = free_port()
    armature = [sys.executable, "-m", "armature"]
    up = [*armature, "up", "--detach", "--prefect-server-port", str(port), "--mlflow-port", str(free_port())]
    subprocess.run(up, cwd=tmp_path, check=True, timeout=400)
    yield f"http://127.0.0.1:{port}"
    subprocess.run([*armature, "down"], cwd=tmp_path, check=True, timeout=90)


def fill_list(page, label: str, values: list[str], control: str) -> None:
    """Leave exactly these values in the form's list."""
    box = page.locator(f"xpath={LABEL.format(label)}{PROPERTY}").first
    while box.locator(control).count() < len(values):
        box.get_by_text("Add item").click()
        page.wait_for_timeout(300)
    for index, value in enumerate(values):
        box.locator(control).nth(index).fill(value)
    assert box.locator(control).count() == len(values)


def wait_for_end(api: str, run_id: str, seconds: float) -> dict:
    deadline = time.monotonic() + seconds
    while True:
        run = httpx.get(f"{api}/flow_runs/{run_id}").json()
        if run["state_type"] in ("COMPLETED", "FAILED", "CRASHED", "CANCELLED"):
            return run
        assert time.monotonic() < deadline, run["state_name"]
        time.sleep(2)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as play:
        chromium = play.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield chromium
        chromium.close()


def open_page(browser: Any, url: str) -> Any:
    page = browser.new_page(viewport={"width": 1400, "height": 1600})
    page.set_default_timeout(120_000)
    page.goto(url, wait_until="domcontentloaded")
    return page


def start_from_the_form(browser: Any, dashboard: str, checkpoints: list[str], seeds: list[str]) -> dict[str, Any]:
    """Fill and submit the custom-run form of evaluate/sweep; the flow run that it started."""
    api = f"{dashboard}/api"
    deployment = httpx.get(f"{api}/deployments/name/evaluate/sweep").json()["id"]
    page = open_page(browser, f"{dashboard}/deployments/deployment/{deployment}/run")
    page.locator(f"xpath={LABEL.format('Checkpoints')}").first.wait_for()
    fill_list(page, "Checkpoints", checkpoints, "textarea")
    fill_list(page, "Seeds", seeds, "input")
    page.get_by_role("button", name="Submit").click()
    query = {"deployments": {"id": {"any_": [deployment]}}}
    while not (runs := httpx.post(f"{api}/flow_runs/filter", json=query).json()):
        page.wait_for_timeout(500)
    started: dict[str, Any] = runs[0]
    return started


def table_of_results(browser: Any, dashboard: str, run_id: str) -> str:
    """What the table on the run's page shows."""
    page = open_page(browser, f"{dashboard}/runs/flow-run/{run_id}")
    page.get_by_text("Artifacts", exact=True).last.click()
    page.get_by_text("results", exact=True).first.click()
    page.get_by_text("accuracy_low").first.wait_for()
    text: str = page.inner_text("body")
    return text


def test_sweep_of_two_checkpoints_and_two_seeds_from_the_dashboard(platform: str, browser: Any):
    checkpoints = ["tiny/qwen2-vl", "tiny/qwen2.5-vl"]
    started = start_from_the_form(browser, platform, checkpoints, ["3", "4"])
    assert started["parameters"]["sweep"] == {"checkpoints": checkpoints, "seeds": [3, 4]}
    ended = wait_for_end(f"{platform}/api", started["id"], seconds=1200)
    assert ended["state_type"] == "COMPLETED", ended["state"]
    shown = table_of_results(browser, platform, started["id"])
    for checkpoint in checkpoints:
        for seed in (3, 4):
            assert f"{checkpoint}-seed{seed}" in shown
