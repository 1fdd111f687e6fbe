"""A run's numbers at the address that the machine names, as Prometheus reads them."""

from __future__ import annotations

import socket

import httpx
import pytest
from prefect import flow, task
from prometheus_client.parser import text_string_to_metric_families

from armature.components.contracts.errors import ConfigurationError
from armature.tasks.prometheus import serve_metrics
from tests.builders import make_machine
from tests.refusals import refused

pytestmark = pytest.mark.usefixtures("tracking")


def free_address() -> str:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return f"127.0.0.1:{taken.getsockname()[1]}"


def read(text: str) -> dict[tuple[str, ...], float]:
    """Return the samples in a Prometheus text: the value by the metric's name and its labels except "run"."""
    return {
        (sample.name, *(value for key, value in sorted(sample.labels.items()) if key != "run")): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


@pytest.mark.usefixtures("prefect_server")
def test_running_stage_is_in_the_metrics(tmp_path):
    from armature.tasks.events import PrefectEvents
    from armature.tasks.tracking import tracked

    address = free_address()

    @task(name="stage", task_run_name="train-demo")
    def stage() -> str:
        with tracked("shown", "run", {}, {}) as run, PrefectEvents(run, set(), tmp_path) as events:
            events.metrics({"reward": 0.25, "loss": 3}, 4)
            events.metrics({"reward": 0.5}, 5)
            events.progress("train", 5, 60)
            return httpx.get(f"http://{address}/metrics", trust_env=False).text

    @flow
    def training() -> tuple[str, str]:
        with serve_metrics(address, str(tmp_path)), serve_metrics(address, str(tmp_path)):
            during = stage()
            return during, httpx.get(f"http://{address}/metrics", trust_env=False).text

    during, after = map(read, training())
    of_stage = {key: value for key, value in during.items() if "train-demo" in key}
    assert of_stage == {
        ("armature_step", "train-demo"): 5,
        ("armature_step_metric", "reward", "train-demo"): 0.5,
        ("armature_step_metric", "loss", "train-demo"): 3,
        ("armature_progress_done", "train", "train-demo"): 5,
        ("armature_progress_total", "train", "train-demo"): 60,
    }
    assert during["armature_disk_free_bytes", str(tmp_path)] > 0
    assert 0 < during["armature_memory_available_bytes",] < 2**50
    assert not [key for key in after if "train-demo" in key]
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"http://{address}/metrics", trust_env=False)


def test_rejects_used_or_invalid_metrics_address(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ConfigurationError) as caught, serve_metrics(address, str(tmp_path)):
            pass
        assert address in caught.value.where
    for wrong in ("9464", "http://127.0.0.1:9464", "127.0.0.1:", "::1:9464"):
        with refused("string_pattern_mismatch", "metrics"):
            make_machine(metrics=wrong)
