"""The task files of infra/skypilot: read by SkyPilot itself, and run with stand-ins for what they start."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import typer.main
import yaml

from armature.cli import app
from armature.components.configuration import load_recipe
from armature.components.contracts.machine import Machine

ROOT = Path(__file__).parents[3]
TASKS = sorted((ROOT / "infra/skypilot").glob("*.yaml"))
SKY = ROOT / ".venv-skypilot/bin/python"
READ = """
import json, sys, sky
task = sky.Task.from_yaml(sys.argv[1])
(resources,) = task.resources
print(json.dumps({"nodes": task.num_nodes, "envs": task.envs, "accelerators": resources.accelerators}))
"""
RECORD = '#!/bin/sh\nfor word in "$@"; do printf "%s\\n" "$word"; done\n'
GIVEN = {"STORE": "s3://bucket/prefix", "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2", "SKYPILOT_NODE_RANK": "0"}


def read(file: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([SKY, "-c", READ, file], capture_output=True, text=True, check=False, timeout=300)


@pytest.mark.parametrize("file", TASKS, ids=lambda file: file.stem)
def test_skypilot_takes_them(file: Path) -> None:
    done = read(file)
    assert done.returncode == 0, done.stderr
    task: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    written = yaml.safe_load(file.read_text())
    assert task["nodes"] == written["num_nodes"] and task["accelerators"]
    load_recipe(task["envs"]["RECIPE"])


def test_skypilot_refuses_a_misspelled_field(tmp_path: Path) -> None:
    wrong = tmp_path / "task.yaml"
    wrong.write_text(TASKS[0].read_text().replace("num_nodes", "num_node"))
    done = read(wrong)
    assert done.returncode != 0 and "num_node" in done.stderr


@pytest.mark.parametrize("file", TASKS, ids=lambda file: file.stem)
def test_what_they_run_is_a_run(file: Path, tmp_path: Path) -> None:
    task = yaml.safe_load(file.read_text())
    for program in (".venv/bin/armature", ".venv-ray/bin/python", ".venv-ray/bin/ray"):
        (tmp_path / program).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / program).write_text("#!/bin/sh\n" if program.endswith("ray") else RECORD)
        (tmp_path / program).chmod(0o755)
    variables = {key: str(value) for key, value in task["envs"].items()} | GIVEN | {"HOME": str(tmp_path)}
    done = subprocess.run(
        ["bash", "-c", task["run"]],
        cwd=tmp_path,
        env=os.environ | variables,
        capture_output=True,
        text=True,
        check=True,
    )
    words = done.stdout.splitlines()
    words = words[words.index("run") :]
    command = typer.main.get_command(app).commands["run"]  # type: ignore[attr-defined]
    command.make_context("armature run", words[1:])
    facts = [f"machine.{words[index + 1]}" for index, word in enumerate(words) if word == "--machine"]
    recipe = load_recipe(words[1], facts)
    machine = recipe.sections["machine"]
    assert isinstance(machine, Machine) and machine.remote_store == GIVEN["STORE"]
    assert machine.cluster is None or machine.cluster.address == "10.0.0.1:6379"
