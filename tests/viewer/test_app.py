"""Access to the viewer's page, and its answers."""

from __future__ import annotations

import json
import math
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import httpx
import pytest
from starlette.testclient import TestClient

from armature.components.artifacts.manifest import write_manifest
from armature.components.artifacts.tables import write_table
from armature.components.configuration.stages import STARTED
from armature.components.contracts.rollouts import Failure
from armature.components.environments.make import make_environment
from armature.components.environments.settings import EnvironmentSettings
from armature.components.environments.stage import TASKS
from armature.components.machine.project import project as in_project
from armature.components.pages.report import HtmlReport, write_report
from armature.components.rollouts.batches.table import write_batch
from armature.components.viewer.address import RECORD, announced, viewer_address
from armature.components.viewer.app import ViewServer, view_app
from armature.components.viewer.runs import _environment
from tests.viewer.conftest import RUN, TOKEN, Training

ADDRESS = "http://127.0.0.1:8000"


@pytest.fixture
def client(training: Training) -> Iterator[TestClient]:
    with TestClient(view_app(ViewServer(training.root), TOKEN), ADDRESS, follow_redirects=False) as made:
        yield made


def bearer(token: str = TOKEN) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


def wait_for(client: TestClient, rollouts: int) -> dict[str, object]:
    deadline = time.monotonic() + 20
    while True:
        (run,) = client.get("/api/runs", headers=bearer()).json()["runs"]
        if run["rollouts"] == rollouts:
            return run
        assert time.monotonic() < deadline, run
        time.sleep(0.05)


@pytest.mark.parametrize("path", ["/", "/assets/view.js", "/api/runs", f"/api/runs/{RUN}/rollouts", "/images/x.png"])
def test_requests_without_token_are_refused(client: TestClient, path: str) -> None:
    for headers in ({}, bearer("another"), {"Cookie": f"armature-view-8000={TOKEN[:-1]}"}, bearer("tökén")):
        answer = client.get(path, headers=[(name, value.encode()) for name, value in headers.items()])
        assert answer.status_code == 401
    assert client.get("/?token=another").status_code == 401


def test_link_without_token_shows_form_and_then_opens_the_run(client: TestClient) -> None:
    refused = client.get(f"/?run={RUN[:12]}")
    assert refused.status_code == 401
    assert f'name="run" value="{RUN[:12]}"' in refused.text and TOKEN not in refused.text
    assert "<script>" not in client.get("/", params={"run": '"><script>alert(1)</script>'}).text
    entered = client.get("/", params={"run": RUN[:12], "token": TOKEN})
    assert (entered.status_code, entered.headers["location"]) == (303, f"/#run={RUN[:12]}")
    later = client.get(f"/?run={RUN[:12]}", headers={"Cookie": entered.headers["set-cookie"].partition(";")[0]})
    assert (later.status_code, later.headers["location"]) == (303, f"/#run={RUN[:12]}")


def test_token_in_address_sets_a_cookie(client: TestClient) -> None:
    answer = client.get(f"/?token={TOKEN}")
    assert (answer.status_code, answer.headers["location"]) == (303, "/")
    cookie = answer.headers["set-cookie"].lower()
    assert "httponly" in cookie and "samesite=strict" in cookie
    page = client.get("/", headers={"Cookie": answer.headers["set-cookie"].partition(";")[0]})
    assert page.status_code == 200
    assert "script-src 'self'" in page.headers["content-security-policy"]


def test_foreign_host_name_is_refused(client: TestClient) -> None:
    assert client.get("/api/runs", headers=bearer() | {"Host": "armature.example"}).status_code == 400


def test_running_training_is_listed_as_unfinished(client: TestClient, training: Training) -> None:
    training.step(1, [0.0, 1.0], failures=[Failure("00001-0000-02", "00001-0000", "red", "timeout", "30 s")])
    run = wait_for(client, 2)
    assert (run["id"], run["title"], run["last_step"], run["steps"]) == (RUN, "colors, tiny", 1, 9)
    assert run["finished"] is False
    training.step(2, [1.0])
    wait_for(client, 3)
    history = client.get(f"/api/runs/{RUN}/history", headers=bearer()).json()
    assert [row["reward"] for row in history["rows"]] == [0.5, 1.0]
    assert history["panels"][0]["series"] == ["reward"]


def test_training_of_another_machine_has_curves(client: TestClient, training: Training) -> None:
    made = training.root / "train-vlm" / ("e" * 20)
    made.mkdir(parents=True)
    settings = json.loads((training.workspace / STARTED).read_text())["settings"]
    (made / "history.json").write_text(json.dumps([{"step": 1, "reward": 0.25, "loss": "NaN"}]))
    write_manifest(made, kind="train-vlm", kind_version=1, rows={}, drops={}, inputs={}, settings=settings)
    history = client.get(f"/api/runs/{made.name}/history", headers=bearer()).json()
    assert history["rows"] == [{"step": 1, "reward": 0.25, "loss": "NaN"}]
    assert client.get(f"/api/runs/{made.name}/page", headers=bearer()).status_code == 404
    write_report(made / "report.html", HtmlReport("Made elsewhere"))
    page = client.get(f"/api/runs/{made.name}/page", headers=bearer())
    assert "Made elsewhere" in page.text and page.headers["content-disposition"].startswith("attachment")


def test_evaluations_are_listed_with_their_training(client: TestClient, training: Training) -> None:
    training.step(1, [0.5])
    training.evaluation("c" * 20, training.root / "train-vlm" / RUN, [1.0], ["red"])
    training.evaluation("d" * 20, training.root / "gone", [0.0], ["blue"])
    training.evaluation("e" * 20, training.root / "another", [0.0])
    deadline = time.monotonic() + 20
    while True:
        runs = {run["id"]: run for run in client.get("/api/runs", headers=bearer()).json()["runs"]}
        if len(runs) == 4 and all(run["rollouts"] for run in runs.values()):
            break
        assert time.monotonic() < deadline, runs
        time.sleep(0.05)
    assert runs[RUN]["evaluations"] == {"c" * 20: "after training", "d" * 20: "before training"}
    times = client.get(f"/api/runs/{RUN}/changes?task=red", headers=bearer()).json()["rows"]
    assert {(time["source"], time["answers"][0]["answer"]) for time in times} == {
        ("evaluation", "blue"),
        ("evaluation", "red"),
        ("train", "red"),
    }
    sides = f"first={'d' * 20}:evaluation&second={'c' * 20}:evaluation"
    answer = client.get(f"/api/compare?{sides}&find=red", headers=bearer()).json()
    assert (answer["total"], answer["better"]) == (1, 1)
    group = client.get(f"/api/runs/{'c' * 20}/groups/evaluation/0/00000-0000", headers=bearer()).json()
    assert group["trajectories"][0]["reward"] == 1.0


def test_skipped_batch_has_no_advantages(client: TestClient, training: Training) -> None:
    training.step(1, [1.0])
    skipped = training.root / "batches" / f"{RUN}-00001-skipped"
    skipped.mkdir()
    write_batch(skipped, [])
    answer = client.get(f"/api/runs/{RUN}/groups/train/1/00001-0000", headers=bearer()).json()
    assert answer["trajectories"][0]["turns"][0]["advantages"] is None


def test_group_document_has_every_token_reward_and_image(client: TestClient, training: Training) -> None:
    failure = Failure("00001-0000-02", "00001-0000", "red", "timeout", "30 s")
    training.step(1, [0.25, 1.0], ["red", "blue"], [failure])
    training.step(2, [1.0])
    answer = client.get(f"/api/runs/{RUN}/groups/train/1/00001-0000", headers=bearer()).json()
    first, second = answer["trajectories"]
    assert (first["reward"], second["reward"]) == (0.25, 1.0)
    assert (first["turns"][0]["advantages"], second["turns"][0]["advantages"]) == (0.5, 2.0)
    assert first["turns"][0]["ratios"] == pytest.approx([math.exp(0.25)] * 3, rel=1e-4)
    assert second["turns"][0]["ids"] == [ord(character) for character in "blue"]
    assert answer["task"] == {"color": "red"}
    assert answer["failures"] == [{"id": "00001-0000-02", "reason": "timeout", "detail": "30 s"}]
    (image,) = answer["images"].values()
    served = client.get(image["uri"], headers=bearer())
    assert served.headers["content-type"] == "image/png"
    assert served.content.startswith(b"\x89PNG")


def test_view_command_serves_the_page(training: Training) -> None:
    training.step(1, [1.0])
    command = [sys.executable, "-m", "armature", "view", "--no-browser", "--store", str(training.root)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as program:
        assert program.stdout is not None
        address = program.stdout.readline().strip()
        output = (training.root / RECORD).read_text()
        assert viewer_address(training.root) == address.partition("?")[0]
        assert address.partition("token=")[2] not in output
        with announced(training.root, "http://127.0.0.1:1/"):  # another viewer of the same store
            assert viewer_address(training.root) == address.partition("?")[0]
        assert httpx.get(address, trust_env=False).status_code == 303
        assert httpx.get(address.partition("?")[0], trust_env=False).status_code == 401
        program.send_signal(signal.SIGINT)
        _, errors = program.communicate(timeout=30)
    assert errors == ""
    assert viewer_address(training.root) is None and not (training.root / RECORD).exists()
    (training.root / RECORD).write_text(output)  # as one that was killed leaves it
    assert viewer_address(training.root) is None
    absent = subprocess.run([*command[:-1], "no-such-store"], capture_output=True, text=True)
    assert absent.returncode == 2
    assert "code: store_missing" in absent.stderr


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/api/runs/unknown/rollouts", 404),
        (f"/api/runs/{RUN}/groups/train/7/none", 404),
        (f"/api/runs/{RUN}/groups/heldout/7/none", 404),
        (f"/api/compare?first={RUN}:train&second={RUN}:unknown:1", 404),
        (f"/api/compare?first={RUN}:train:1:2&second={RUN}:train:x", 404),
        (f"/api/compare?first={RUN}:train", 404),
        (f"/api/runs/{RUN}/groups/train/1/../../../etc", 404),
        (f"/api/runs/{RUN}/rollouts?sort=1;drop", 400),
        (f"/api/runs/{RUN}/rollouts?limit=1000000", 400),
        (f"/api/runs/{RUN}/rollouts?low=abc", 400),
        (f"/api/runs/{RUN}/rollouts?unknown=1", 400),
        ("/images/..%2f..%2fetc%2fpasswd", 404),
        (f"/images/{'0' * 64}.png", 404),
        (f"/images/{'0' * 64}.svg", 404),
        ("/assets/..%2fapp.py", 404),
    ],
)
def test_missing_items_answer_404(client: TestClient, path: str, status: int) -> None:
    assert client.get(path, headers=bearer()).status_code == status


def test_right_answer_of_a_table_is_in_its_row_and_no_reward_function_is_imported(training: Training) -> None:
    project = training.root.parent
    (project / "shapes.jsonl").write_text("".join(f'{{"q": "What is {n}?", "a": "{n * n}"}}\n' for n in range(8)))
    (project / "graded.py").write_text("raise SystemExit('imported')\n")
    args = {"source": "shapes.jsonl", "prompt": "{q}", "answer": "a", "rewards": [{"name": "exact_match"}]}
    with in_project(project):
        settings = EnvironmentSettings.model_validate({"name": "dataset", "args": args})
        task = next(iter(make_environment(settings).tasks("train")))
    question = (project / "shapes.jsonl").read_text().splitlines()[task.payload["row"]]

    tasks, run = project / "tasks", {"project": str(project), "recipe": "train-vlm/shapes"}
    document = json.loads(settings.model_dump_json())
    document["args"]["rewards"] = [{"name": "function", "args": {"function": "graded:reward"}}]
    (tasks / "environment.json").write_text(json.dumps(document))
    rows: list[dict[str, object]] = [{"task_id": "red", "split": "train", "payload": json.dumps(task.payload)}]
    write_table(tasks / "train.parquet", rows, TASKS)
    started = training.workspace / STARTED
    started.write_text(json.dumps({**json.loads(started.read_text()), **run}))
    training.step(1, [1.0])

    with TestClient(view_app(ViewServer(training.root), TOKEN), ADDRESS, headers=bearer()) as client:
        assert wait_for(client, 1)["title"] == "train-vlm/shapes"
        group = client.get(f"/api/runs/{RUN}/groups/train/1/00001-0000").json()
        (row,) = client.get(f"/api/runs/{RUN}/rollouts").json()["rows"]
        assert group["answer"] == json.loads(question)["a"]
        assert row["image"] == next(iter(group["images"].values()))["uri"]
        (project / "shapes.jsonl").write_text('{"q": "?", "a": "1"}\n' * 8)
        _environment.cache_clear()
        changed = client.get(f"/api/runs/{RUN}/groups/train/1/00001-0000").json()["answer"]
        assert changed.startswith("unknown: ")
