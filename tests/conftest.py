"""What every test stands on: no network, no telemetry, one thread."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

os.environ.update(
    HF_HUB_OFFLINE="1",
    HF_HUB_DISABLE_TELEMETRY="1",
    DO_NOT_TRACK="1",
    MLFLOW_DISABLE_TELEMETRY="true",
    PREFECT_SERVER_ANALYTICS_ENABLED="false",
    TOKENIZERS_PARALLELISM="false",
    OMP_NUM_THREADS="1",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Slow tests may take long on a busy machine. On several cores their files go first, so that none ends alone."""
    for item in items:
        if item.get_closest_marker("slow") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(900))
    if "PYTEST_XDIST_WORKER" in os.environ:
        items.sort(key=lambda item: item.get_closest_marker("slow") is None)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """`@pytest.mark.gpu(n)` needs n CUDA devices."""
    if marker := item.get_closest_marker("gpu"):
        import torch

        needed = marker.args[0] if marker.args else 1
        if torch.cuda.device_count() < needed:
            pytest.skip(f"needs {needed} CUDA device(s), this machine has {torch.cuda.device_count()}")


@pytest.fixture(scope="session")
def prefect_server() -> Iterator[None]:
    """Starting it takes about 15 s, so it is never started per test."""
    from prefect.testing.utilities import prefect_test_harness

    with prefect_test_harness(server_startup_timeout=120):
        yield


@pytest.fixture(scope="session")
def empty_mlflow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A database with its tables made once; making them takes seconds."""
    from mlflow import MlflowClient

    path = tmp_path_factory.mktemp("mlflow") / "empty.db"
    MlflowClient(f"sqlite:///{path}").search_experiments()
    return path


@pytest.fixture
def tracking(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, empty_mlflow: Path) -> str:
    """An empty MLflow of this test's own; the test's folder becomes the working folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mlflow.db").write_bytes(empty_mlflow.read_bytes())
    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    return uri
