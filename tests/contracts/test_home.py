"""A run stores its files in one folder, also when DVC runs it in a copy of the repository."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from armature.components.configuration.stages import open_store
from armature.components.contracts.installation import home_folder, original
from armature.components.contracts.machine import Machine
from armature.components.machine.project import project, project_path
from armature.init import write_project
from tests.builders import make_machine


@pytest.fixture
def repository(tmp_path) -> Path:
    """A repository with a copy of itself in .dvc/tmp, as `dvc exp run --temp` makes it. Both have their stages in the
    folder `demo`."""
    folder = (tmp_path / "repository").resolve()
    for root in (folder, folder / ".dvc/tmp/exps/standalone/tmp1"):
        (root / "demo").mkdir(parents=True)
        (root / ".git").mkdir()
    return folder


@pytest.fixture
def copy(repository, monkeypatch) -> Path:
    """The folder `demo` in the copy. It is the working folder, as when DVC runs the command of a stage there."""
    result = repository / ".dvc/tmp/exps/standalone/tmp1/demo"
    monkeypatch.setenv("DVC_ROOT", str(repository))
    monkeypatch.chdir(result)
    return result


def test_dvc_copy_uses_store_and_servers_of_the_repository(repository, copy):
    assert home_folder() == repository / "demo"
    assert open_store(Machine()).root == repository / "demo/.armature/store"
    assert open_store(make_machine(store=copy / "own")).root == copy / "own"
    python = repository / "demo/.venv-vllm/bin/python"
    python.parent.mkdir(parents=True)
    python.touch()
    assert Machine().server_interpreter == python


def test_dvc_copy_prefers_its_own_files(repository, copy):
    for folder, names in ((repository / "demo", ("both", "ignored")), (copy, ("both",))):
        for name in names:
            (folder / name).mkdir()
    with project(Path()):
        assert project_path("both") == copy / "both"
        assert project_path("ignored") == repository / "demo/ignored"
        assert project_path("ignored/deep") == repository / "demo/ignored/deep"
        assert project_path("/elsewhere") == Path("/elsewhere")
        assert project_path("../../beside") == repository.parent / "beside"


@pytest.mark.parametrize("root", [None, "", ".", "elsewhere"])
def test_paths_outside_a_dvc_copy_are_unchanged(root, repository, monkeypatch):
    monkeypatch.chdir(repository / "demo")
    monkeypatch.delenv("DVC_ROOT", raising=False)
    if root is not None:
        monkeypatch.setenv("DVC_ROOT", str(repository / root) if root else "")
    assert home_folder() == Path() and original(Path("/a")) == Path("/a") and original(Path("a")) == Path("a")


def test_stage_in_a_dvc_copy_leaves_no_files(repository):
    """The command of `armature init`'s `dvc.yaml`; what git ignores is not in the copy."""
    copy = repository / ".dvc/tmp/exps/standalone/tmp1/demo"
    for folder in (repository / "demo", copy):
        write_project(folder)
    (copy / "data/shapes.jsonl").unlink()
    command = [sys.executable, "-m", "armature", "stage", "tasks", "--config", "recipe.toml", "--out", "results/tasks"]
    environment = {**os.environ, "DVC_ROOT": str(repository), "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert not (copy / ".armature").exists()
    (made,) = (repository / "demo/.armature/store/tasks").glob("*/manifest.json")
    assert json.loads(made.read_text()) == json.loads((copy / "results/tasks/manifest.json").read_text())
