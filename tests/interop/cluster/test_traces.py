"""A run under a worker sends its spans to an OTLP receiver."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.interop.cluster.collector import collecting

ROOT = Path(__file__).parents[3]
RUN = """
import sys

from prefect import flow, task
from prefect.flow_engine import run_flow_in_subprocess


@task(task_run_name="a step")
def step():
    pass


@flow(flow_run_name="a run")
def run():
    step()


if __name__ == "__main__":
    process = run_flow_in_subprocess(run)
    process.join()
    sys.exit(process.exitcode)
"""
"""Program that runs a flow in a process of its own, as Prefect's workers do."""


def run(folder: Path, url: str) -> subprocess.CompletedProcess[str]:
    (folder / "run.py").write_text(RUN)
    variables = {
        "OTEL_PYTHON_TRACER_PROVIDER": "armature",
        "OTEL_EXPORTER_OTLP_ENDPOINT": url,
        "PREFECT_HOME": str(folder / "prefect"),
        "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "120",
        "PYTHONPATH": str(ROOT),
    }
    command = [sys.executable, folder / "run.py"]
    environment = {**os.environ, **variables}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def test_trace_collector_receives_the_spans_of_a_run(tmp_path: Path) -> None:
    with collecting() as (url, collector):
        done = run(tmp_path, url)
    assert done.returncode == 0, done.stderr
    spans = {each.name: each for each in collector.spans}
    assert spans["a step"].parent_span_id == spans["a run"].span_id
    assert spans["a step"].trace_id == spans["a run"].trace_id
    assert "armature" in collector.services


def test_absent_trace_collector_does_not_stop_a_run(tmp_path: Path) -> None:
    done = run(tmp_path, "http://127.0.0.1:9")
    assert done.returncode == 0, done.stderr
    assert "Completed" in done.stderr
