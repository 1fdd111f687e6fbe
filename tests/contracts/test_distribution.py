"""What our messages and docs tell a user to install is ours, and exists."""

from __future__ import annotations

import re
import subprocess
import tomllib
from importlib.metadata import metadata
from pathlib import Path

from components.contracts.distribution import DISTRIBUTION, install_command, installed_version

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def tracked() -> dict[str, str]:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    texts = [name for name in listed if name.endswith((".py", ".md", ".toml", ".txt", ".yaml", "Makefile"))]
    return {name: (ROOT / name).read_text() for name in texts if (ROOT / name).is_file()}


def test_the_constant_is_the_name_of_the_project():
    assert PROJECT["name"] == DISTRIBUTION == metadata(DISTRIBUTION)["Name"]
    assert installed_version() == PROJECT["version"]
    assert install_command("thor") == "pip install 'armature-vla[thor]'"


def test_nobody_is_told_to_install_the_other_armature():
    told = re.compile(r"pip install [\"']?armature\b(?!-)|[\"' ]armature\[[a-z]")
    here = Path(__file__).relative_to(ROOT).as_posix()
    assert [name for name, text in tracked().items() if name != here and told.search(text)] == []


def test_every_extra_that_is_named_exists():
    named = set()
    for name, text in tracked().items():
        if not name.startswith("tests/contracts/"):
            named |= set(re.findall(r"install_command\([\"'](\w+)[\"']\)", text))
            named |= {extra for each in re.findall(rf"{DISTRIBUTION}\[([\w,]+)\]", text) for extra in each.split(",")}
    assert {"alfworld", "thor", "libero", "datasets", "dask", "s3", "verifiers"} <= named
    assert named <= set(PROJECT["optional-dependencies"])
