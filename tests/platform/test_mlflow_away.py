"""MLflow that is out of reach, hangs, comes back or stays away: said, waited for, and nothing of a run is lost."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from threading import Timer

import pytest
from prefect import flow

from armature.components.contracts.errors import TrackingError
from armature.components.machine.process import Program
from armature.services import free_port, mlflow_server, wait_until_ready
from armature.tasks.events import PrefectEvents
from armature.tasks.tracking import tracked

REPOSITORY = Path(__file__).resolve().parents[2]


def show(folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)} | variables
    command = [sys.executable, "-m", "armature", "show"]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=60, check=False)


def test_absent_mlflow_is_an_error_within_seconds(tmp_path):
    done = show(tmp_path, MLFLOW_TRACKING_URI=f"http://me:pass-word@127.0.0.1:{free_port()}")
    assert done.returncode == 1 and "MLflow does not answer" in done.stderr and "Traceback" not in done.stderr
    assert "code: tracking_failed" in done.stderr and "pass-word" not in done.stderr


def test_silent_mlflow_times_out(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"http://127.0.0.1:{server.getsockname()[1]}"
        done = show(tmp_path, MLFLOW_TRACKING_URI=address, MLFLOW_HTTP_REQUEST_TIMEOUT="1")
    assert done.returncode == 1 and "MLflow does not answer" in done.stderr and "Traceback" not in done.stderr


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[Program]:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("mlflow"))
        service = mlflow_server(free_port())
        running = service.start()
        wait_until_ready(service, running, 120)
        patch.setenv("MLFLOW_TRACKING_URI", service.ready_url.removesuffix("/health"))
        patch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "1")
        yield running
        awake(running)
        running.stop()


def asleep(server: Program) -> None:
    """A server that hangs: it accepts connections and answers nothing."""
    for process in server.family():
        process.suspend()


def awake(server: Program) -> None:
    for process in server.family():
        process.resume()


def steps_of(run_id: str) -> list[int]:
    from armature.tasks.mlflow_client import client

    return sorted(point.step for point in client().get_metric_history(run_id, "loss"))


@pytest.mark.slow
@pytest.mark.usefixtures("prefect_server")
def test_stage_survives_mlflow_outage_with_complete_record(server, tmp_path):
    @flow
    def training() -> str:
        with tracked("away", "run", {}, {}) as run, PrefectEvents(run, set(), tmp_path) as events:
            events.metrics({"loss": 1.0}, 1)
            asleep(server)
            began = time.monotonic()
            for step in range(2, 6):
                events.metrics({"loss": 1.0 / step}, step)
                time.sleep(1.5)  # the sender tries meanwhile
            assert time.monotonic() - began < 60
            Timer(4.0, awake, [server]).start()
        return run.run_id

    assert steps_of(training()) == [1, 2, 3, 4, 5]


@pytest.mark.slow
@pytest.mark.usefixtures("prefect_server")
def test_absent_mlflow_at_the_end_hides_no_stage_error(server, tmp_path):
    from armature.tasks.patience import patience

    @flow
    def training(fails: bool) -> None:
        with tracked("away", "run", {}, {}) as run:
            try:
                with patience(3.0), PrefectEvents(run, set(), tmp_path) as events:
                    asleep(server)
                    events.metrics({"loss": 1.0}, 1)
                    if fails:
                        raise ZeroDivisionError("its own error")
            finally:
                awake(server)

    state = training(fails=False, return_state=True)
    error = state.result(raise_on_failure=False)
    assert isinstance(error, TrackingError)
    with pytest.raises(ZeroDivisionError):
        training(fails=True)
