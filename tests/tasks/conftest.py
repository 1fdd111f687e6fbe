from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from components.contracts.machine import Machine
from components.stages import STAGES


@pytest.fixture(scope="session")
def prefect_server() -> Iterator[None]:
    """Starting it takes about 15 s, so it is never started per test."""
    os.environ.update(PREFECT_SERVER_ANALYTICS_ENABLED="false", DO_NOT_TRACK="1")
    from prefect.testing.utilities import prefect_test_harness

    with prefect_test_harness(server_startup_timeout=120):
        yield


@pytest.fixture(scope="session")
def demo_stages() -> Iterator[ModuleType]:
    """Registers the stages of demo_stages.py as another package would, by name."""
    spec = importlib.util.spec_from_file_location("demo_stages", Path(__file__).with_name("demo_stages.py"))
    module = importlib.util.module_from_spec(spec)
    sys.modules["demo_stages"] = module
    spec.loader.exec_module(module)
    names = {"demo-tasks": "TASKS", "demo-train": "TRAIN", "demo-evaluate": "EVALUATE"}
    STAGES._entries.update({name: f"demo_stages:{attribute}" for name, attribute in names.items()})
    yield module
    for name in names:
        del STAGES._entries[name]


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


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(store=str(tmp_path / "store"))
