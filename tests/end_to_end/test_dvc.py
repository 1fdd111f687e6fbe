"""DVC and a flow's stages agree: what one has made, the other does not make again, under the same digest."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from components.configuration import load_recipe
from components.contracts.machine import Machine
from components.stages import STAGES, run_stage

ROOT = Path(__file__).parents[2]
SHORT = ["model.tiny.format.steps=2", "environment.train_tasks=16", "environment.heldout_tasks=16"]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """What DVC needs of this project, with a shorter recipe, in a repository of its own."""
    shutil.copy(ROOT / "dvc.yaml", tmp_path)
    for folder in ("components", "configs"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    recipe = tmp_path / "configs/train-vlm/colors.toml"
    text = recipe.read_text()
    for override in SHORT:
        key, _, value = override.rpartition(".")[2].partition("=")
        old = next(line for line in text.splitlines() if line.startswith(f"{key} = "))
        text = text.replace(old, f"{key} = {value}", 1)
    recipe.write_text(text)
    shutil.copytree(ROOT / ".dvc", tmp_path / ".dvc", ignore=shutil.ignore_patterns("cache", "tmp", "config.local"))
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    return tmp_path


def repro(project: Path) -> str:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    command = [sys.executable, "-m", "dvc", "repro", "tasks", "model"]
    env = {**os.environ, "PATH": path, "DVC_NO_ANALYTICS": "1"}
    done = subprocess.run(command, cwd=project, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def locked_digest(project: Path, stage: str) -> str:
    lock = yaml.safe_load((project / "dvc.lock").read_text())
    digest: str = lock["stages"][stage]["outs"][0]["md5"]
    return digest


def test_a_second_repro_does_nothing_and_finds_what_a_flow_has_made(project: Path) -> None:
    recipe = load_recipe("train-vlm/colors", [*SHORT, f'machine.store="{project / ".armature/store"}"'])
    machine = recipe.sections["machine"]
    assert isinstance(machine, Machine)
    by_flow = run_stage("model", recipe.settings_for(STAGES["model"].settings), {}, machine)

    first = repro(project)
    assert "tasks: made in" in first and "model: already made" in first
    assert locked_digest(project, "model") == by_flow.digest

    by_flow = run_stage("tasks", recipe.settings_for(STAGES["tasks"].settings), {}, machine)
    assert locked_digest(project, "tasks") == by_flow.digest
    assert "Running stage" not in repro(project)
