"""A folder in which version 0.1 worked, with its store, its remote store and its databases, and today's code in it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from components.artifacts.store import ArtifactStore
from tests.vla.conftest import write_dataset

ROOT = Path(__file__).parents[2]
COMMIT = "cbe0e56"
RECIPE = "quantile-stats/folder"


def is_known() -> bool:
    """Whether this clone has the last commit of 0.1."""
    command = ["git", "cat-file", "-e", f"{COMMIT}^{{commit}}"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, check=False).returncode == 0


pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.skipif(not is_known(), reason=f"this clone lacks {COMMIT}: git fetch --unshallow"),
]


@dataclass(frozen=True)
class Project:
    """A folder of runs, and what 0.1 printed there."""

    folder: Path
    printed: str

    def run(self, *words: str, code: str = str(ROOT)) -> str:
        return run(self.folder, code, *words)

    def digest(self, name: str) -> str:
        (found,) = re.findall(rf"^{name} +([0-9a-f]{{32}}\.dir) ", self.printed, re.MULTILINE)
        return str(found)


def run(folder: Path, code: str, *words: str) -> str:
    """The command, of this code; its output."""
    environment = {**os.environ, "PYTHONPATH": code, "DO_NOT_TRACK": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "armature", *words],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    code, folder = tmp_path_factory.mktemp("code"), tmp_path_factory.mktemp("project")
    archive = subprocess.run(["git", "archive", COMMIT], cwd=ROOT, capture_output=True, check=True).stdout
    subprocess.run(["tar", "-x", "-C", code], input=archive, check=True)
    installed = code / "armature-0.1.0.dist-info"  # as its distribution was called
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: armature\nVersion: 0.1.0\n")
    (folder / "data").mkdir()
    write_dataset(folder / "data/lerobot", 6)
    remote = ("--machine", f"remote_store={folder}/remote")
    return Project(folder, run(folder, str(code), "run", RECIPE, *remote))


def test_its_artifacts_are_as_they_were_made(project: Project) -> None:
    assert project.run("verify") == "2 artifacts are as they were made\n"


def test_its_remote_store_is_found_and_fetched(project: Project, tmp_path: Path) -> None:
    here = {each.kind: each for each in ArtifactStore(project.folder / ".armature/store")}
    assert here.keys() == {"dataset", "quantile-stats"}
    fetched = ArtifactStore(tmp_path, str(project.folder / "remote"))
    for kind, made in here.items():
        found = fetched.find(kind, made.path.name)
        assert found is not None and found.digest == made.digest


def test_its_records_say_what_a_result_was_made_from(project: Project) -> None:
    tree = project.run("show", project.digest("statistics"))
    assert f"dataset  {project.digest('dataset')}" in tree


def test_runs_go_on_in_its_databases(project: Project) -> None:
    before = project.run("show").splitlines()
    project.run("run", RECIPE)
    after = project.run("show").splitlines()
    assert after[1:] == before and len(before) == 1
    assert all("FINISHED" in line for line in after)
