"""Episodes and videos of a robot policy's training: what is answered, and the page in a real browser."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from armature.components.contracts.rollouts import Failure
from armature.components.evaluation.wilson import wilson_interval
from armature.components.rollouts.table import write_failures
from armature.components.viewer.app import ViewServer, view_app
from tests.browser import NEEDS_CHROMIUM
from tests.viewer.conftest import viewed
from tests.viewer.robots import AFTER, BEFORE, RUN, make_evaluation, make_step, make_training
from tests.viewer.test_app import ADDRESS, TOKEN, bearer


@pytest.fixture
def store(tmp_path: Path) -> Path:
    make_training(tmp_path / "store")
    return tmp_path / "store"


@pytest.fixture
def client(store: Path) -> Iterator[TestClient]:
    with TestClient(view_app(ViewServer(store), TOKEN), ADDRESS, headers=bearer()) as made:
        yield made


def episodes(client: TestClient, query: str = "") -> dict[str, Any]:
    answer: dict[str, Any] = client.get(f"/api/runs/{RUN}/episodes?{query}").json()
    return answer


def test_lists_runs_of_robot_policies(client: TestClient) -> None:
    runs = {run["id"]: run for run in client.get("/api/runs").json()["runs"]}
    assert {id: run["stage"] for id, run in runs.items()} == {
        RUN: "train-vla-rl",
        BEFORE: "evaluate-libero",
        AFTER: "evaluate-libero",
    }
    training = runs[RUN]
    assert training["evaluations"] == {AFTER: "after training", BEFORE: "before training"}
    assert (training["title"], training["rollouts"], training["last_step"], training["steps"]) == (
        "libero_spatial",
        5,
        2,
        3,
    )
    history = client.get(f"/api/runs/{RUN}/history").json()
    assert [panel["title"] for panel in history["panels"]] == ["Reward of the rollouts", "Success of the rollouts"]


def test_filters_episodes_by_outcome(client: TestClient, store: Path) -> None:
    answer = episodes(client)
    assert [(each["step"], each["outcome"], each["chunks"]) for each in answer["rows"]] == [
        (2, "solved", 1),
        (2, "solved", 2),
        (1, "solved", 2),
        (1, "truncated", 3),
        (1, "truncated", 3),
    ]
    rate = wilson_interval(1, 3)
    first = {"step": 1, "solved": 1, "truncated": 2, "success": rate.estimate, "low": rate.low, "high": rate.high}
    assert answer["steps"][0] == first and answer["steps"][1]["solved"] == 2
    assert episodes(client, "outcome=truncated")["total"] == 2
    assert episodes(client, "outcome=solved&last_step=1")["total"] == 1
    assert episodes(client, "initial_state=3")["total"] == 5 and episodes(client, "task=1")["total"] == 0
    assert len(episodes(client, "limit=2&offset=4")["rows"]) == 1
    assert client.get(f"/api/runs/{RUN}/episodes?outcome=other").status_code == 400
    make_step(store, 3, (1, 0.0))
    assert episodes(client)["total"] == 6


def test_episode_document_has_every_answer(client: TestClient) -> None:
    row = episodes(client, "outcome=truncated")["rows"][0]
    result = client.get(f"/api/runs/{RUN}/episodes/1/{row['episode_id']}").json()
    assert result["outcome"] == "truncated" and result["language"] == "reach"
    assert [each["value"] for each in result["answers"]] == [0.5, 0.375, 0.25]
    assert [each["logprob"] for each in result["answers"]] == [2.0, 2.125, 2.25]
    assert [each["advantage"] for each in result["answers"]] == [0.25, 1.25, 2.25]
    (uri,) = result["answers"][0]["images"].values()
    assert client.get(uri).content.startswith(b"\x89PNG")
    assert client.get(f"/api/runs/{RUN}/episodes/1/unknown").status_code == 404
    assert client.get(f"/api/runs/{RUN}/episodes/9/{row['episode_id']}").status_code == 404


def test_pairs_videos_of_the_same_initial_state(client: TestClient, store: Path) -> None:
    pairs = client.get(f"/api/runs/{RUN}/videos").json()["rows"]
    assert [(each["episode"], each["before"]["solved"], each["after"]["solved"]) for each in pairs] == [
        (0, False, True),
        (1, True, True),
    ]
    whole = client.get(pairs[0]["before"]["uri"])
    assert whole.headers["content-type"] == "video/mp4" and whole.content[4:8] == b"ftyp"
    part = client.get(pairs[0]["before"]["uri"], headers={"Range": "bytes=4-7"})
    assert (part.status_code, part.content) == (206, b"ftyp")
    ours = client.get(f"/api/runs/{AFTER}/videos").json()["rows"]
    assert [each["episode"] for each in ours] == [0, 1, 2] and all(each["before"] is None for each in ours)
    for path in ("libero_spatial_0/eval_episode_9.mp4", "../results.parquet", "..%2f..%2fresults.parquet", "x.mp4"):
        assert client.get(f"/videos/{AFTER}/{path}").status_code == 404
    make_evaluation(store, "d" * 20, store / "other", True, filmed=1)
    assert client.get(f"/api/runs/{RUN}/videos").json()["rows"] == pairs


@pytest.fixture
def tab(store: Path) -> Iterator[Any]:
    with viewed(store, f"&run={RUN}") as page:
        yield page


def wait_until(tab: Any, condition: str) -> None:
    """Wait until the JavaScript expression `condition` is true for each video (`each`) of the page.

    The test polls, because the page's content security policy forbids scripts that wait in the page.
    """
    deadline = time.monotonic() + 20
    while not tab.evaluate(f"[...document.querySelectorAll('video')].every((each) => {condition})"):
        assert time.monotonic() < deadline, condition
        time.sleep(0.05)


class TestInABrowser:
    pytestmark = NEEDS_CHROMIUM

    def test_episodes(self, tab: Any, store: Path) -> None:
        assert tab.locator("#tabs button:visible").all_inner_texts() == ["Curves", "Episodes", "Failures", "Videos"]
        assert tab.inner_text("#figure-episodes") == "5"
        tab.locator(".chart", has_text="Success of the rollouts").wait_for()
        tab.click("[data-tab=episodes]")
        tab.locator("#list .row").nth(4).wait_for()
        tab.select_option("#outcome", "truncated")
        tab.locator("#count", has_text="2 of 5").wait_for()
        tab.locator("#detail .heading", has_text="truncated").wait_for()
        assert tab.locator("#along .chart h2").all_inner_texts() == [
            "Value along the episode",
            "Mean log-prob along the episode",
        ]
        assert tab.locator("#along polyline").first.get_attribute("points").count(",") == 3
        assert tab.locator("#along .chart text", has_text="chunk 2").count() == 2
        cells = tab.locator(".answers-of tbody tr").nth(1).locator("td.number").all_inner_texts()
        assert cells == ["1", "1", "0.375", "2.125", "0", "1.25"]
        assert tab.locator(".seen img").first.evaluate("image => image.decode().then(() => image.naturalWidth)") == 24
        assert tab.locator("#outcomes tbody tr").all_inner_texts() == [
            "1\t1\t2\t0.33 (0.06 to 0.79)",
            "2\t2\t0\t1 (0.34 to 1)",
        ]
        tab.select_option("#outcome", "")
        tab.locator("#count", has_text="5 of 5").wait_for()
        tab.locator("#outcomes [data-step='2']").click()
        tab.locator("#count", has_text="2 of 5").wait_for()
        make_step(store, 3, (1, 0.0))
        tab.locator("#figure-episodes", has_text="6").wait_for(timeout=10_000)
        assert tab.problems == []

    def test_failures(self, tab: Any, store: Path) -> None:
        fail_episodes(store)
        tab.click("[data-tab=failures]")
        tab.locator("#count", has_text="3 failures, environment_error 2, non_finite_logprobs 1").wait_for()
        tab.locator("#table tbody tr").nth(2).wait_for()
        assert tab.locator("#table tbody tr").nth(2).locator("td").all_inner_texts() == [
            *("1", "non_finite_logprobs", "libero_spatial/1", "00001-000000-0009", "lost <1>")
        ]
        tab.fill("#find", "<1>")
        tab.locator("#count", has_text="1 failure, non_finite_logprobs 1").wait_for()
        tab.locator("#figure-failures", has_text="3").wait_for(timeout=10_000)
        assert tab.problems == []

    def test_videos(self, tab: Any) -> None:
        tab.click("[data-tab=videos]")
        tab.locator("#list .row").nth(1).wait_for()
        tab.locator(".film video").nth(1).wait_for()
        assert not tab.is_visible("#clear")  # nothing is filtered
        captions = tab.locator(".film figcaption").all_inner_texts()
        assert captions == ["before training not solved after 8 actions", "after training solved after 8 actions"]
        assert "reach <b>it</b>" in tab.inner_text("#detail .task")
        wait_until(tab, "each.videoWidth === 32")
        tab.click("#both")
        wait_until(tab, "each.currentTime > 0.1")
        tab.select_option("#run", AFTER)
        tab.locator("#list .row").nth(2).wait_for()
        tab.locator(".film figcaption", has_text="evaluation").wait_for()
        assert tab.locator(".film video").count() == 1
        assert tab.problems == []


def fail_episodes(store: Path) -> None:
    """Write failed episodes to the store: two in step 1 and one in step 2."""
    for step, reasons in ((1, ("environment_error", "non_finite_logprobs")), (2, ("environment_error",))):
        failures = [
            Failure(f"{step:05d}-000000-000{8 + k}", f"{step:05d}-000000", f"libero_spatial/{k}", reason, f"lost <{k}>")
            for k, reason in enumerate(reasons)
        ]
        write_failures(store / "robot-rollouts" / f"{RUN}-{step:05d}", failures)


def test_failed_episodes_are_listed_with_their_reasons(client: TestClient, store: Path) -> None:
    def found(query: str = "") -> dict[str, Any]:
        answer: dict[str, Any] = client.get(f"/api/runs/{RUN}/failures?{query}").json()
        return answer

    assert found() == {"total": 0, "reasons": [], "rows": []}
    fail_episodes(store)
    (listed,) = (run for run in client.get("/api/runs").json()["runs"] if run["id"] == RUN)
    assert listed["failures"] == 3
    every = found("source=train")
    assert every["reasons"] == [
        {"reason": "environment_error", "count": 2},
        {"reason": "non_finite_logprobs", "count": 1},
    ]
    places = [(row["step"], row["trajectory_id"], row["task_id"], row["detail"]) for row in every["rows"]]
    assert places == [
        (2, "00002-000000-0008", "libero_spatial/0", "lost <0>"),
        (1, "00001-000000-0008", "libero_spatial/0", "lost <0>"),
        (1, "00001-000000-0009", "libero_spatial/1", "lost <1>"),
    ]
    asked = ("find=FINITE", "task=libero_spatial/1", "last_step=1&first_step=1", "limit=1&offset=2", "source=heldout")
    assert [(found(query)["total"], len(found(query)["rows"])) for query in asked] == [
        *((1, 1), (1, 1), (2, 2), (3, 1), (0, 0))
    ]
