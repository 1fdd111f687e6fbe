"""What DVC needs of this project, in a repository of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[2]


class Project:
    """A folder with `dvc.yaml`, the recipes and what they depend on; a test may shorten the recipes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        shutil.copy(ROOT / "dvc.yaml", folder)
        for name in ("components", "configs"):
            shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        ignored = shutil.ignore_patterns("cache", "tmp", "config.local")
        shutil.copytree(ROOT / ".dvc", folder / ".dvc", ignore=ignored)
        subprocess.run(["git", "init", "-q"], cwd=folder, check=True)

    @property
    def store(self) -> Path:
        return self.folder / ".armature/store"

    def repro(self, *stages: str) -> str:
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        command = [sys.executable, "-m", "dvc", "repro", *stages]
        env = {**os.environ, "PATH": path, "DVC_NO_ANALYTICS": "1"}
        done = subprocess.run(command, cwd=self.folder, env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def locked_digest(self, stage: str) -> str:
        lock = yaml.safe_load((self.folder / "dvc.lock").read_text())
        digest: str = lock["stages"][stage]["outs"][0]["md5"]
        return digest
