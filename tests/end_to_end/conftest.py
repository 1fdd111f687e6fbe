"""A copy of the files that DVC needs, in a repository of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

import yaml

from armature.components.configuration import CONFIGS, Recipe
from armature.components.configuration.stages import STAGES, run_stage
from armature.components.contracts.machine import Machine
from armature.components.contracts.stages import Artifact

ROOT = Path(__file__).parents[2]


def make(recipe: Recipe, name: str, machine: Machine | None = None, **inputs: Artifact) -> Artifact:
    """Run the stage `name` of a recipe and return its artifact. `machine` replaces the machine in the recipe."""
    return run_stage(name, recipe.settings_for(STAGES[name].settings), inputs, machine or recipe.sections["machine"])


def start_stage(
    stage: str, name: str, folder: Path, overrides: Iterable[str], inputs: Mapping[str, Path]
) -> subprocess.Popen[bytes]:
    """Start a stage of the recipe `name` in a process of its own, with a store of its own in `folder`."""
    folder.mkdir(exist_ok=True)
    words = [word for each in (*overrides, f'machine.store="{folder / "store"}"') for word in ("--set", each)]
    words += [word for each, path in inputs.items() for word in ("--input", f"{each}={path}")]
    command = [sys.executable, "-m", "armature", "stage", stage, "--config", str(CONFIGS / f"{name}.toml"), *words]
    with (folder / "run.log").open("ab") as log:
        return subprocess.Popen(
            [*command, "--out", str(folder / "made")], stdout=log, stderr=log, start_new_session=True
        )


class Project:
    """A git repository with a copy of `dvc.yaml`, the recipes and the code that they depend on. A test may shorten the
    recipes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in ("dvc.yaml", ".dvcignore", ".gitignore"):
            shutil.copy(ROOT / name, folder)
        for name in ("armature", "components", "configs", "flows", "tasks"):
            shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"), symlinks=True)
        ignored = shutil.ignore_patterns("cache", "tmp", "config.local")
        shutil.copytree(ROOT / ".dvc", folder / ".dvc", ignore=ignored)
        subprocess.run(["git", "init", "-q"], cwd=folder, check=True)

    @property
    def store(self) -> Path:
        return self.folder / ".armature/store"

    def dvc(self, *words: str, code: int = 0) -> str:
        return self._call(sys.executable, "-m", "dvc", *words, code=code)

    def commit(self) -> None:
        self._call("git", "add", "-A")
        self._call("git", "commit", "-qm", "a state")

    def _call(self, *command: str, code: int = 0) -> str:
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        identity = {f"GIT_{who}_{what}": "a@b" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
        env = {**os.environ, **identity, "PATH": path, "PYTHONPATH": str(ROOT), "DVC_NO_ANALYTICS": "1"}
        done = subprocess.run(command, cwd=self.folder, env=env, capture_output=True, text=True)
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout

    def locked_digest(self, stage: str) -> str:
        lock = yaml.safe_load((self.folder / "dvc.lock").read_text())
        digest: str = lock["stages"][stage]["outs"][0]["md5"]
        return digest
