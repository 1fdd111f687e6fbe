"""Where MLflow's records are, and who may see what of that."""

from __future__ import annotations

from pathlib import Path

import pytest

from tasks.mlflow_client import page, tracking_uri


def test_the_database_of_this_folder_is_for_its_owner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mlflow import MlflowClient

    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    MlflowClient(tracking_uri()).search_experiments()
    databases = list((tmp_path / ".armature").glob("mlflow.db*"))
    assert databases and all(file.stat().st_mode & 0o077 == 0 for file in databases)
    databases[0].chmod(0o644)
    tracking_uri()
    assert databases[0].stat().st_mode & 0o077 == 0


def test_the_address_of_a_page_has_no_password(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "https://me:pass-word@tracking.example:5000/")
    assert page("run", "1").startswith("https://tracking.example:5000/#/experiments/1/runs/run")
