"""A store in which one entry is damaged, and addresses that ask for what no store has."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import duckdb
import psutil
import pytest
from starlette.testclient import TestClient

from armature.components.artifacts.tables import write_table
from armature.components.configuration.stages import STARTED
from armature.components.environments.stage import TASKS
from armature.components.viewer import app, tables
from armature.components.viewer.app import ViewServer, view_app
from armature.components.viewer.tables import RolloutIndex
from tests.hostile_names import HOSTILE_NAMES
from tests.viewer.conftest import RUN, TOKEN, Training

DEEP = "[" * 100_000 + "]" * 100_000
SHOWN_DEEP = "[" * 300 + "]" * 300
HUGE = "1" + "0" * 400
OTHER = "e" * 20


def client_of(store: Path) -> TestClient:
    headers = {"Authorization": f"Bearer {TOKEN}"}
    return TestClient(view_app(ViewServer(store), TOKEN), "http://127.0.0.1:8000", headers=headers)


def rollouts_shown(client: TestClient) -> int:
    deadline = time.monotonic() + 10
    while not (total := client.get(f"/api/runs/{RUN}/rollouts").json()["total"]) and time.monotonic() < deadline:
        time.sleep(0.02)
    return int(total)


def link_to_itself(path: Path) -> None:
    path.symlink_to(path.name)


def link_to_nothing(path: Path) -> None:
    path.symlink_to("nothing")


def folder_of_pipes(path: Path) -> None:
    path.mkdir()
    os.mkfifo(path / "rollouts.parquet")
    os.mkfifo(path / "failures.parquet")


def bind_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(path))


def folder_without_permission(path: Path) -> None:
    path.mkdir(mode=0)


@pytest.mark.parametrize("place", ["rollouts", "evaluations", "evaluate", "workspaces"])
@pytest.mark.parametrize(
    "damage", [link_to_itself, link_to_nothing, os.mkfifo, folder_of_pipes, folder_without_permission, Path.touch]
)
def test_unreadable_entry_does_not_hide_others(training: Training, place: str, damage: Callable[[Path], None]) -> None:
    (training.root / place).mkdir(exist_ok=True)
    damage(training.root / place / f"{OTHER}-00001")
    (training.root / place / os.fsdecode(b"\xff-00001")).mkdir()
    training.step(1, [0, 1, 1])
    index = RolloutIndex(training.root)
    index.refresh()
    assert index.counts()[RUN]["rollouts"] == 3
    assert all(path.startswith(str(training.root / place)) for path in index.problems)
    index.close()


def test_problem_ends_when_its_entry_is_gone(training: Training) -> None:
    (training.root / "rollouts").mkdir()
    link = training.root / "rollouts" / f"{OTHER}-00001"
    link_to_itself(link)
    index = RolloutIndex(training.root)
    index.refresh()
    assert list(index.problems) == [str(link)]
    link.unlink()
    index.refresh()
    assert not index.problems
    index.close()


def test_pipe_among_the_tables_of_ratios_is_a_problem(training: Training) -> None:
    training.step(1, [0, 1])
    pipe = training.workspace / "log_ratios" / "00002.parquet"
    os.mkfifo(pipe)
    index = RolloutIndex(training.root)
    index.refresh()
    assert list(index.problems) == [str(pipe)] and index.counts()[RUN]["rollouts"] == 2
    index.close()


def test_error_of_the_reader_is_shown_and_does_not_end_it(training: Training, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error that nobody foresaw, and one after which DuckDB refuses the database."""
    training.step(1, [0, 1, 1])
    errors: list[Exception] = [ZeroDivisionError("once"), duckdb.FatalException("once")]
    listed = tables._listed

    def fail_at_first(*arguments: Any) -> Any:
        if errors:
            raise errors[0]
        return listed(*arguments)

    monkeypatch.setattr(tables, "_listed", fail_at_first)
    monkeypatch.setattr(app, "REFRESH", 0.01)
    with client_of(training.root) as client:
        while errors:
            shown = client.get("/api/runs").json()["problems"].get(str(training.root), "")
            if shown.startswith(type(errors[0]).__name__):
                errors.pop(0)
        assert rollouts_shown(client) == 3
        assert client.get("/api/runs").json()["problems"] == {}


@pytest.mark.parametrize("name", HOSTILE_NAMES)
def test_store_folder_may_have_any_name(training: Training, name: str, tmp_path: Path) -> None:
    """Nothing but the store itself is read: the folder beside it, which `*` matches, has another run's rollouts."""
    training.step(1, [0, 1, 1])
    named, beside = tmp_path / "top" / name, tmp_path / "top" / "v"
    named.parent.mkdir()
    training.root.rename(named)
    if name not in (".", "v"):
        beside.mkdir()
        (beside / "rollouts").symlink_to(named / "rollouts")
    index = RolloutIndex(named)
    index.refresh()
    (row, *_), count = index._rows("SELECT * FROM rollouts ORDER BY trajectory_id", []), index.counts()[RUN]["rollouts"]
    assert (count, row["step"], row["reward"], row["run"], index.problems) == (3, 1, 0.0, RUN, {})
    index.close()


def edit_started(training: Training, **changes: object) -> None:
    path = training.root / "workspaces" / f"train-vlm-{OTHER}" / STARTED
    path.parent.mkdir()
    document = json.loads((training.workspace / STARTED).read_text())
    path.write_text(json.dumps(document | changes))


def deep_settings(training: Training) -> None:
    edit_started(training, settings={"environment": {"name": json.loads(SHOWN_DEEP)}, "model": {"source": ""}})


def huge_steps(training: Training) -> None:
    names = {"environment": {"name": "x"}, "model": {"source": "y"}}
    edit_started(training, settings={**names, "trainer": {"max_steps": 10**400}})


def infinite_steps(training: Training) -> None:
    names = {"environment": {"name": "x"}, "model": {"source": "y"}}
    edit_started(training, settings={**names, "trainer": {"max_steps": float("inf")}})


def raw_document(text: str) -> Callable[[Training], None]:
    def write(training: Training) -> None:
        edit_started(training)
        (training.root / "workspaces" / f"train-vlm-{OTHER}" / STARTED).write_text(text)

    return write


def pipe_document(training: Training) -> None:
    edit_started(training)
    path = training.root / "workspaces" / f"train-vlm-{OTHER}" / STARTED
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize(
    "damage",
    [
        deep_settings,
        huge_steps,
        infinite_steps,
        pipe_document,
        *map(raw_document, (DEEP, HUGE, "1" * 5000, "null", '{"settings": [], "inputs": []}')),
    ],
)
def test_damaged_run_record_hides_no_other_run(training: Training, damage: Callable[[Training], None]) -> None:
    damage(training)
    with client_of(training.root) as client:
        answer = client.get("/api/runs")
        assert answer.status_code == 200 and RUN in [run["id"] for run in answer.json()["runs"]]
        for path in ("history", "rollouts", "failures", "tasks"):
            assert client.get(f"/api/runs/{OTHER}/{path}").status_code < 500
            assert client.get(f"/api/runs/{RUN}/{path}").status_code == 200


@pytest.mark.parametrize(
    "line",
    [
        *(DEEP, f'{{"step": 1, "x": {DEEP}}}', f'{{"step": {HUGE}}}', f'{{"step": 1, "x": {HUGE}}}', "1" * 5000),
        *("[]", "1", '{"x": 1}', '{"step": [], "x": 1}', "\x00"),
    ],
)
def test_unreadable_history_answers_with_an_error(training: Training, line: str) -> None:
    (training.workspace / "history.jsonl").write_text(line + "\n")
    with client_of(training.root) as client:
        assert client.get(f"/api/runs/{RUN}/history").status_code in (200, 404)
        assert client.get("/api/runs").status_code == 200


@pytest.mark.parametrize("payload", [DEEP, SHOWN_DEEP, f'{{"x": {HUGE}}}', "1" * 5000, '{"x": NaN}', "{"])
def test_unreadable_task_hides_no_rollouts(training: Training, tmp_path: Path, payload: str) -> None:
    training.step(1, [0, 1])
    write_table(tmp_path / "tasks/train.parquet", [{"task_id": "red", "split": "train", "payload": payload}], TASKS)
    with client_of(training.root) as client:
        answer = client.get(f"/api/runs/{RUN}/groups/train/1/00001-0000")
        assert answer.status_code == 200 and len(answer.json()["trajectories"]) == 2


@pytest.mark.parametrize("rewards", [[1e308, 1e308], [float("inf"), 1.0], [float("nan"), 1.0], [-1e308, 1e308]])
def test_rewards_that_overflow_a_sum_are_answered(training: Training, rewards: list[float]) -> None:
    training.step(1, rewards)
    with client_of(training.root) as client:
        rollouts_shown(client)
        for path in ("rollouts", "tasks", "changes?task=red", "rollouts?sort=reward-", "history"):
            assert client.get(f"/api/runs/{RUN}/{path}").status_code == 200


NUMBERS = ("9" * 10, "9" * 40, "9" * 400, "9" * 5000, "1e400", "-1", "nan", "\u0664", "%00", "x")
ADDRESSES = (
    "/api/runs/{run}/rollouts?offset={number}",
    "/api/runs/{run}/rollouts?limit={number}",
    "/api/runs/{run}/rollouts?first_step={number}",
    "/api/runs/{run}/rollouts?low={number}",
    "/api/runs/{run}/rollouts?find={number}",
    "/api/runs/{run}/failures?last_step={number}",
    "/api/runs/{run}/tasks?high={number}",
    "/api/runs/{run}/changes?task={number}",
    "/api/runs/{run}/episodes?task={number}",
    "/api/runs/{run}/episodes/{number}/a",
    "/api/runs/{run}/episodes/1/{number}",
    "/api/runs/{run}/groups/train/{number}/a",
    "/api/runs/{run}/groups/train/1/{number}",
    "/api/runs/{number}/history",
    "/videos/{run}/{number}.mp4",
    "/images/{number}.png",
    "/api/compare?first={run}:train:{number}&second={run}:train:1",
)


def test_no_address_causes_a_server_error(training: Training) -> None:
    training.step(1, [0, 1])
    with client_of(training.root) as client:
        asked = [path.format(run=RUN, number=number) for path in ADDRESSES for number in NUMBERS]
        assert [path[:80] for path in asked if client.get(path).status_code >= 422] == []


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGKILL])
def test_view_command_leaves_no_files_behind(training: Training, tmp_path: Path, number: int) -> None:
    training.step(1, [0, 1, 1])
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    command = [sys.executable, "-m", "armature", "view", "--store", str(training.root), "--no-browser"]
    environment = os.environ | {"TMPDIR": str(temporary)}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None and running.stdout.readline()
        time.sleep(0.5)
        running.send_signal(number)
        running.wait(20)
    assert list(temporary.iterdir()) == []


def test_index_spills_to_a_folder_that_a_later_index_removes(
    training: Training, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setattr(tables, "MEMORY", "20MB")
    left = tmp_path / f"{tables.SPILL}{next(pid for pid in range(2**22, 2**23) if not psutil.pid_exists(pid))}-ab"
    left.mkdir()
    index = RolloutIndex(training.root)
    assert not left.exists()
    index._database.execute("CREATE TABLE large AS SELECT hash(range) AS a, hash(range + 1) AS b FROM range(3000000)")
    assert [path.name.startswith(tables.SPILL) for path in tmp_path.glob("armature-view-*")] == [True]
    other = RolloutIndex(training.root)
    assert index._row("SELECT count(*) FROM large", []) == (3000000,)
    for each in (index, other):
        each.close()
    assert not list(tmp_path.glob("armature-view-*"))
