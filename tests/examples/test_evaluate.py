"""examples/evaluate.py is the stage evaluate: for the same checkpoint and seed it prints the same numbers."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from armature.components.configuration import load_recipe
from armature.components.configuration.stages import STAGES, run_stage
from armature.components.contracts.machine import Machine
from armature.components.contracts.stages import Artifact
from tests.conftest import SharedServer

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_evaluate_example_prints_the_metrics_of_the_stage(
    shared_server: SharedServer, joined_url: str, tmp_path: Path
) -> None:
    overrides = [
        f'machine.servers.endpoints=["{joined_url}"]',
        "environment.heldout_tasks=24",
        "evaluation.max_tasks=16",
        "evaluation.samples_per_task=2",
    ]
    command = [sys.executable, "examples/evaluate.py", "--model", str(shared_server.checkpoint), *overrides]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr

    recipe = load_recipe("evaluate/vlm", [*overrides, f'machine.store="{tmp_path / "store"}"'])
    machine = recipe.sections["machine"]
    assert isinstance(machine, Machine)
    inputs = {
        "tasks": run_stage("tasks", recipe.settings_for(STAGES["tasks"].settings), {}, machine),
        "model": Artifact(kind="model", path=shared_server.checkpoint, digest="0"),
    }
    made = run_stage("evaluate", recipe.settings_for(STAGES["evaluate"].settings), inputs, machine)
    numbers = json.loads((made.path / "metrics.json").read_text())
    groups = {"accuracy": numbers, **numbers["kinds"]}
    printed = {line.split()[0]: line.split(maxsplit=1)[1] for line in done.stdout.splitlines() if line.strip()}
    assert printed == {
        name: "{accuracy:.3f} [{accuracy_low:.3f}, {accuracy_high:.3f}]  of {episodes}".format(**group)
        for name, group in groups.items()
    }
