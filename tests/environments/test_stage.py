"""The tasks stage: tables that read back, a preview, and the same bytes every time."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
from PIL import Image

from components.contracts.errors import ConfigurationError, DataError
from components.contracts.machine import Machine
from components.environments.make import make_environment
from components.environments.settings import EnvironmentSettings
from components.environments.stage import load_environment, load_tasks
from components.stages import run_stage

from .conftest import Example


@pytest.fixture
def chosen(example: tuple[str, Example]) -> EnvironmentSettings:
    name, known = example
    return EnvironmentSettings(name=name, args=known.args, train_tasks=20, heldout_tasks=6, seed=3)


def made(settings: EnvironmentSettings, store: Path) -> tuple[Path, str]:
    artifact = run_stage("tasks", settings, {}, Machine(store=str(store)))
    return artifact.path, artifact.digest


def test_tasks_and_environment_read_back(chosen: EnvironmentSettings, tmp_path: Path) -> None:
    folder, _ = made(chosen, tmp_path)
    environment = make_environment(chosen)
    assert load_tasks(folder, "train") == list(environment.tasks("train"))
    assert load_tasks(folder, "heldout") == list(environment.tasks("heldout"))
    assert list(load_environment(folder).tasks("train")) == load_tasks(folder, "train")
    frame = pd.read_parquet(folder / "train.parquet")
    assert frame.columns.tolist() == ["task_id", "split", "payload"] and len(frame) == 20
    with Image.open(folder / "preview.png") as preview:
        assert len(preview.convert("RGB").getcolors(10**6) or []) > 2


def test_two_stores_hold_the_same_digest(chosen: EnvironmentSettings, tmp_path: Path) -> None:
    assert made(chosen, tmp_path / "one")[1] == made(chosen, tmp_path / "other")[1]


def test_a_folder_that_is_no_tasks_artifact_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot be read"):
        load_tasks(tmp_path, "train")
    with pytest.raises(DataError, match="not an artifact of the tasks stage"):
        load_environment(tmp_path)


def test_an_unknown_environment_suggests_a_known_one() -> None:
    with pytest.raises(ConfigurationError, match="did you mean 'colors'"):
        EnvironmentSettings(name="colours", args={}, train_tasks=1, heldout_tasks=1, seed=0)


def test_settings_import_quickly_and_without_torch() -> None:
    code = "import components.environments.settings, sys; sys.exit(bool({'torch', 'verifiers'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
