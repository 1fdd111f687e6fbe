"""The hooks of .pre-commit-config.yaml run on the whole checkout, and refuse what they are there for."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = Path(sys.executable).parent
HOOKS = [
    hook for each in yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"] for hook in each["hooks"]
]


def run(folder: Path, *words: str | Path) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(folder)}
    return subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def checkout(tmp_path_factory) -> Path:
    """A git repository with a copy of the files that git tracks here. It uses this checkout's Python environment."""
    folder = tmp_path_factory.mktemp("checkout")
    for name in run(ROOT, "git", "ls-files").stdout.splitlines():
        if os.path.lexists(ROOT / name):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name, follow_symlinks=False)
    (folder / ".venv").symlink_to(PROGRAMS.parent)
    run(folder, "git", "init", "--quiet")
    run(folder, "git", "add", "--all")
    return folder


def test_every_pre_commit_hook_is_an_installed_command():
    assert [hook["id"] for hook in HOOKS if hook["language"] != "system"] == []
    programs = [hook["entry"].split()[0] for hook in HOOKS]
    assert [program for program in programs if shutil.which(ROOT / program) is None and program != "sh"] == []


def test_hooks_are_the_commands_of_make_lint():
    recipe = re.search(r"^lint:.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert recipe is not None
    lint = {line.split("#")[0].strip().replace("$(BIN)", ".venv/bin") for line in recipe[1].splitlines()}
    fixing = {"ruff-check": ".venv/bin/ruff check .", "ruff-format": ".venv/bin/ruff format --check ."}
    hooks = {fixing.get(hook["id"], hook["entry"]) for hook in HOOKS if "stages" not in hook}
    assert hooks == lint - {".venv/bin/python -m tests.words"}


@pytest.mark.slow
def test_pre_commit_hooks_pass(checkout, monkeypatch):
    monkeypatch.setenv("SKIP", "mypy,mypy-examples")  # which take minutes from nothing; `make lint` runs them
    done = run(checkout, PROGRAMS / "pre-commit", "run", "--all-files")
    assert done.returncode == 0, done.stdout + done.stderr
    passed = [line.partition("..")[0] for line in done.stdout.splitlines() if line.endswith("Passed")]
    assert passed == [hook["name"] for hook in HOOKS if "stages" not in hook and not hook["id"].startswith("mypy")]


@pytest.mark.slow
def test_unformatted_file_is_fixed_and_refused(checkout):
    path = checkout / "examples/unformatted.py"
    path.write_text("import sys\nimport os\nprint( sys.path,os.name )\n")
    run(checkout, "git", "add", path)
    for hook, left in (("ruff-check", "import os\nimport sys"), ("ruff-format", "print(sys.path, os.name)\n")):
        done = run(checkout, PROGRAMS / "pre-commit", "run", hook, "--files", path)
        assert done.returncode == 1 and left in path.read_text(), done.stdout


@pytest.mark.parametrize(("length", "code"), [(72, 0), (73, 1)])
def test_rejects_long_commit_subject(length, code, checkout, tmp_path):
    message = tmp_path / "message"
    message.write_text("s" * length + "\n\n" + "a body may be as wide as it likes " * 9 + "\n")
    words = ["run", "--hook-stage", "commit-msg", "--commit-msg-filename", str(message)]
    assert run(checkout, PROGRAMS / "pre-commit", *words).returncode == code
