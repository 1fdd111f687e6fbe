"""`armature drill`: what it compares, whom it signals, and what it leaves behind."""

from __future__ import annotations

import json
import random
import signal
import socket
import sys
import time
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from armature.components.machine.process import program
from armature.drill.faults import CUT, FILL, KINDS, MARK, choose, signal_processes
from armature.drill.proxy import Proxy
from armature.drill.runs import DrilledRun, first_difference

SLEEPS = "import time; print('up', flush=True); time.sleep(100)"


def finished_run(folder: Path, **changed: object) -> DrilledRun:
    """Write the files of a finished run with two steps. `changed` are values of its second step."""
    step = {"reward": 0.5, "loss": 0.25, "timing/step": random.random(), "token": 7, "answers": "a", "weights": b"w"}
    step["played"] = "a"
    for number in (1, 2):
        values = step | changed if number == 2 else step
        rollouts = folder / f"store/rollouts/{random.random()}-{number:05d}/rollouts.parquet"
        rollouts.parent.mkdir(parents=True)
        columns = {"completion_token_ids": [[1, 2], [values["token"]]], "generate_seconds": [random.random()] * 2}
        pq.write_table(pa.table(columns), rollouts)
        evaluation = folder / f"store/evaluations/e-{number:05d}/results.parquet"
        evaluation.parent.mkdir(parents=True)
        pq.write_table(pa.table({"answer": [values["answers"]]}), evaluation)
        pq.write_table(pa.table({"answer": [values["played"]]}), evaluation.with_name("rollouts.parquet"))
        step = step | {"step": number}
    weights = folder / "made/checkpoint/model.safetensors"
    weights.parent.mkdir(parents=True)
    weights.write_bytes(bytes((step | changed)["weights"]))
    history = [{**step, "step": 1}, {**step, **changed, "step": 2, "timing/step": random.random()}]
    (folder / "made/history.json").write_text(json.dumps(history, default=repr))
    return DrilledRun(folder, "train-vlm/colors", (), {})


@pytest.mark.parametrize(
    ("changed", "begins"),
    [
        ({}, ""),
        ({"loss": 0.125}, "step 2, history: loss: 0.125, undisturbed 0.25"),
        ({"token": 8, "loss": 0.125, "weights": b"v"}, "step 2, rollouts: completion_token_ids: "),
        ({"answers": "b", "weights": b"v"}, "step 2, evaluations: results answer: "),
        ({"played": "b", "weights": b"v"}, "step 2, evaluations: rollouts answer: "),
        ({"weights": b"v"}, "step 3, checkpoint: model.safetensors: "),
    ],
    ids=[
        "nothing but times",
        "metric",
        "tokens before metrics and weights",
        "evaluation",
        "its rollouts",
        "weights alone",
    ],
)
def test_first_difference_is_named(tmp_path: Path, changed: dict[str, object], begins: str) -> None:
    other = finished_run(tmp_path / "other", **changed).results()
    difference = first_difference(other, finished_run(tmp_path / "undisturbed").results())
    assert difference.startswith(begins) and bool(difference) == bool(changed)


def test_missing_step_is_a_difference() -> None:
    undisturbed = {(1, 0, "rollouts: reward"): "a", (2, 0, "rollouts: reward"): "b"}
    assert first_difference({(1, 0, "rollouts: reward"): "a"}, undisturbed).startswith(
        "step 2, rollouts: reward: missing"
    )


def test_signals_only_processes_with_the_mark(tmp_path: Path) -> None:
    """Three processes have the same command line; the one with the mark, whose guard has it too, is killed."""
    module = tmp_path.joinpath(*KINDS["rank"].split(".")).with_suffix(".py")
    module.parent.mkdir(parents=True)
    module.write_text(SLEEPS)
    for folder in list(module.relative_to(tmp_path).parents)[:-1]:
        (tmp_path / folder / "__init__.py").touch()

    def start(name: str, mark: str | None) -> program:
        environment = {MARK: mark}
        return program([sys.executable, "-m", KINDS["rank"]], log=tmp_path / name, env=environment, cwd=tmp_path)

    with start("ours", "m1") as ours, start("other drill", "m2") as other, start("bystander", None) as bystander:
        for name in ("ours", "other drill", "bystander"):
            until(lambda name=name: (tmp_path / name).read_text() == "up\n")
        (pid,) = (process.pid for process in ours.family())
        assert {each for _, each in signal_processes("m1", "rank")} == {pid}
        assert not signal_processes("m1", "server") and not signal_processes("", "rank")
        assert {each for _, each in signal_processes("m1", "rank", signal.SIGKILL)} == {pid}
        assert ours.wait(10) == -signal.SIGKILL
        assert other.returncode is None and bystander.returncode is None
        assert [psutil.Process(each.family()[0].pid).is_running() for each in (other, bystander)] == [True, True]


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_proxy_cuts_and_restores_connections() -> None:
    server = socket.create_server(("127.0.0.1", 0))
    with server, closing(Proxy(f"http://127.0.0.1:{server.getsockname()[1]}")) as proxy:
        address = ("127.0.0.1", int(proxy.url.rpartition(":")[2]))
        with socket.create_connection(address, 10) as client, server.accept()[0] as connection:
            client.sendall(b"question")
            assert connection.recv(100) == b"question"
            connection.sendall(b"answer")
            assert client.recv(100) == b"answer"
            proxy.cut()
            assert client.recv(100) == b"" and connection.recv(100) == b""
        with socket.create_connection(address, 10) as client, suppress(ConnectionError):
            assert client.recv(100) == b""
        proxy.restore()
        with socket.create_connection(address, 10) as client, server.accept()[0] as connection:
            connection.sendall(b"back")
            assert client.recv(100) == b"back"


def test_faults_follow_from_the_seed_and_are_possible() -> None:
    possible = ["run", "rank", CUT]
    drawn = [choose(random.Random(seed), possible, 10) for seed in range(300)]
    assert drawn == [choose(random.Random(seed), possible, 10) for seed in range(300)]
    faults = [fault for each in drawn for fault in each]
    pairs = {(fault.action, fault.victim) for fault in faults}
    assert pairs == {("kill", "run"), ("kill", "rank"), ("pause", "run"), ("pause", "rank"), ("cut", CUT)}
    assert {fault.step for fault in faults} == set(range(10)) and FILL not in {fault.victim for fault in faults}
    assert all(each == sorted(each, key=lambda fault: (fault.step, fault.delay)) for each in drawn)


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["sft/colors"], "flow_not_drilled"),
        (["--machine", f"servers.python={sys.executable}"], "interpreter_without_vllm"),
    ],
)
def test_recipe_that_cannot_be_drilled_leaves_nothing(tmp_path, armature, monkeypatch, arguments, code) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    for place in ([], ["--folder", "new"]):
        done = armature("drill", *arguments, *place)
        assert done.code == 2 and f"code: {code}" in done.stderr
        assert list(tmp_path.iterdir()) == []


def test_runs_of_another_drill_are_not_taken(tmp_path, armature) -> None:
    kept = tmp_path / "drills/undisturbed/run.log"
    kept.parent.mkdir(parents=True)
    kept.touch()
    done, code = armature("drill", "--folder", "drills"), "drill_folder_used"
    assert done.code == 2 and f"code: {code}" in done.stderr and kept.exists()
