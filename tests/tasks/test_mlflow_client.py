"""Where MLflow's records are, and who may see what of that."""

from __future__ import annotations

import os
import subprocess
import sys
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


@pytest.mark.slow
def test_runs_that_begin_together_in_a_new_folder_share_its_database(tmp_path: Path) -> None:
    """As two commands in a fresh checkout: MLflow makes its tables in steps that no second process may meet."""
    script = "from tasks.mlflow_client import experiment_id; print(experiment_id('shared'))"
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
    said = [start.communicate(timeout=280) for start in starts]
    assert [start.returncode for start in starts] == [0, 0, 0], said[0][1].decode()[-2000:]
    assert len({out for out, _ in said}) == 1
