"""A real Prometheus reads a training, and every panel of the Grafana dashboard has something to show; a receiver of
OpenTelemetry's protocol gets the spans of what the training did."""

from __future__ import annotations

import json
import shutil
import socket
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Status

from armature.components.machine.process import Program
from tests.interop.cluster.collector import Collector, collecting

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.skipif(shutil.which("prometheus") is None, reason="Prometheus is not installed"),
]

ROOT = Path(__file__).parents[2]
STEPS = 4
DASHBOARD = json.loads((ROOT / "infra/grafana/armature.json").read_text())

ONLY_OF_FAULTS = {"increase(armature_pool_failures_total[10m])"}
"""PromQL expressions of the dashboard that have no data in a run without failures."""


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


def expressions() -> dict[str, str]:
    """Return the title of the dashboard's panel for each PromQL expression. The expressions select all flow runs."""
    return {
        target["expr"].replace("$run", ".*"): panel["title"]
        for panel in DASHBOARD["panels"]
        for target in panel["targets"]
    }


class Prometheus:
    """A Prometheus server that scrapes `target`, and a client of its HTTP API."""

    def __init__(self, folder: Path, target: str) -> None:
        port = free_port()
        self._url = f"http://127.0.0.1:{port}/api/v1"
        settings = {
            "global": {"scrape_interval": "1s"},
            "scrape_configs": [{"job_name": "armature", "static_configs": [{"targets": [target]}]}],
        }
        folder.mkdir()
        (folder / "prometheus.yml").write_text(json.dumps(settings))  # JSON is YAML
        self._program = Program(
            [
                "prometheus",
                f"--config.file={folder / 'prometheus.yml'}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address=127.0.0.1:{port}",
            ],
            log=folder / "log",
        )

    def ask(self, path: str, **parameters: Any) -> list[dict[str, Any]]:
        """Return the result of a query. Fail if Prometheus rejects the query."""
        answer = httpx.get(f"{self._url}/{path}", params=parameters, trust_env=False, timeout=60)
        assert answer.status_code == 200, answer.text
        result: list[dict[str, Any]] = answer.json()["data"]["result"]
        return result

    def wait_until_ready(self) -> None:
        deadline = time.monotonic() + 120
        while True:
            assert self._program.returncode is None and time.monotonic() < deadline, self._program.tail(20)
            try:
                self.ask("query", query="up")
                return
            except httpx.TransportError:
                time.sleep(0.5)

    def stop(self) -> None:
        self._program.stop()


@dataclass(frozen=True)
class Watched:
    """The metrics and traces of a finished training of a few steps, and the times of its start and end."""

    prometheus: Prometheus
    collector: Collector
    began: float
    ended: float


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    folder = tmp_path_factory.mktemp("watched")
    address = f"127.0.0.1:{free_port()}"
    prometheus = Prometheus(folder / "prometheus", address)
    prometheus.wait_until_ready()
    values = (f"trainer.max_steps={STEPS}", "environment.train_tasks=256", "environment.heldout_tasks=32")
    settings = [f"--set={value}" for value in values]
    began = time.time()
    command = [
        sys.executable,
        "-m",
        "armature",
        "run",
        "train-vlm/colors",
        *settings,
        "--machine",
        f"metrics={address}",
    ]
    (folder / ".venv-vllm").symlink_to(ROOT / ".venv-vllm")
    with collecting() as (collector_url, collector):
        environment = {
            "PREFECT_LOGGING_HANDLERS_CONSOLE_FORMATTER": "json",
            "OTEL_PYTHON_TRACER_PROVIDER": "armature",
            "OTEL_EXPORTER_OTLP_ENDPOINT": collector_url,
        }
        training = Program(command, env=environment, log=folder / "run.log", cwd=folder)
        assert training.wait(800) == 0, training.tail(60)
    try:
        yield Watched(prometheus, collector, began, time.time())
    finally:
        prometheus.stop()


def test_every_grafana_panel_shows_the_training(watched: Watched) -> None:
    empty = [
        (title, expression)
        for expression, title in expressions().items()
        if not watched.prometheus.ask(
            "query_range", query=expression, start=watched.began, end=watched.ended, step="1s"
        )
    ]
    assert {expression for _, expression in empty} <= ONLY_OF_FAULTS


def test_trace_collector_has_every_step_of_the_run(watched: Watched) -> None:
    runs = {bytes(each.span_id): each for each in watched.collector.spans if of_a_run(each)}
    (root,) = [each for each in runs.values() if not each.parent_span_id]
    names = {each.name for each in runs.values()}
    of_steps = {f"{kind}-{step:05d}" for kind in ("rollouts", "batch", "step") for step in range(1, STEPS + 1)}
    synced = {f"sync-{step:05d}" for step in range(1, STEPS)}  # the last weights are those of the checkpoint
    assert {"tasks", "model", "train-vlm", *of_steps, *synced} < names
    assert watched.collector.services == {"armature"}
    assert {bytes(each.trace_id) for each in runs.values()} == {bytes(root.trace_id)}
    assert all(
        bytes(each.parent_span_id) in runs and each.start_time_unix_nano >= root.start_time_unix_nano
        for each in runs.values()
        if each is not root
    )
    assert {each.status.code for each in runs.values()} == {Status.STATUS_CODE_OK}


def of_a_run(span: Any) -> bool:
    """Return True if a span belongs to a flow run or task run of Prefect."""
    return any(each.key == "prefect.run.id" for each in span.attributes)
