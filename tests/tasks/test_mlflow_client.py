"""The place of MLflow's records and the access rights of its files."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from sqlalchemy import make_url

from armature import services
from armature.tasks.mlflow_client import client, experiment_id, page, tracking_uri
from tests.hostile_names import EVERY_CHARACTER
from tests.refusals import refused


def test_database_is_readable_by_its_owner_only(tmp_path, monkeypatch):
    from mlflow import MlflowClient

    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    MlflowClient(tracking_uri()).search_experiments()
    databases = list((tmp_path / ".armature").glob("mlflow.db*"))
    assert databases and all(file.stat().st_mode & 0o077 == 0 for file in databases)
    databases[0].chmod(0o644)
    tracking_uri()
    assert databases[0].stat().st_mode & 0o077 == 0


def test_project_folder_may_have_any_name(tmp_path, monkeypatch):
    """Its first question makes the database, which MLflow begins with an experiment of its own."""
    folder = tmp_path / EVERY_CHARACTER
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    run = client().create_run(experiment_id("named"))
    (folder / "file.txt").write_text("kept")
    client().log_artifact(run.info.run_id, "file.txt", "a folder")
    (saved,) = (folder / ".armature").rglob("file.txt")
    assert saved.read_text() == "kept" and saved.parent.name == "a folder"
    assert [each.path for each in client().list_artifacts(run.info.run_id, "a folder")] == ["a folder/file.txt"]
    assert list(tmp_path.iterdir()) == [folder]
    assert (folder / ".armature/mlflow.db").stat().st_size > 10_000
    served = services.mlflow_server(0)
    assert served.environment["MLFLOW_BACKEND_STORE_URI"] == tracking_uri()
    prefect = make_url(services.prefect_server(0).environment["PREFECT_API_DATABASE_CONNECTION_URL"])
    assert prefect.database == str(folder / ".armature/prefect/prefect.db")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("MLFLOW_TRACKING_URI", "gopher://host/1"),
        *(("MLFLOW_TRACKING_URI", uri) for uri in ("not an address", "sqlite", "sqlite:x", "sqlite://a:b/c")),
        ("MLFLOW_HTTP_REQUEST_TIMEOUT", "soon"),
        ("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "-"),
    ],
)
def test_invalid_mlflow_variable_is_named(tmp_path, name, value, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    monkeypatch.setenv(name, value)
    with refused("invalid_mlflow_variable" if "HTTP" in name else "invalid_mlflow_address", name):
        client().search_experiments()


def test_page_address_has_no_password(monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "https://me:pass-word@tracking.example:5000/")
    assert page("run", "1").startswith("https://tracking.example:5000/#/experiments/1/runs/run")


@pytest.mark.long
@pytest.mark.slow
def test_simultaneous_first_runs_create_one_database(tmp_path):
    """Two commands start in a fresh checkout. MLflow creates its tables in steps that a second process must not
    interrupt."""
    script = "from armature.tasks.mlflow_client import experiment_id; print(experiment_id('shared'))"
    environment = {name: value for name, value in os.environ.items() if name != "MLFLOW_TRACKING_URI"}
    environment["PYTHONPATH"] = str(Path(__file__).parents[2])
    starts = [
        subprocess.Popen(
            [sys.executable, "-c", script],
            cwd=tmp_path,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for _ in range(3)
    ]
    output = [start.communicate(timeout=280) for start in starts]
    assert [start.returncode for start in starts] == [0, 0, 0], output[0][1].decode()[-2000:]
    assert len({out for out, _ in output}) == 1
