"""examples/own_environment.py learns its task, and its class is one that recipes can name."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples/own_environment.py"


@pytest.mark.slow
def test_own_environment_is_learned() -> None:
    done = subprocess.run([sys.executable, EXAMPLE], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    reward = re.search(r"reward in the last step ([\d.]+)", done.stdout)
    assert reward is not None and float(reward[1]) >= 0.9, done.stdout


def test_documented_entry_point_registers_the_environment(tmp_path: Path) -> None:
    """The example is installed as a package with the entry point that its docstring shows."""
    source = EXAMPLE.read_text()
    (entry,) = re.findall(r'^ {4}\[project\.entry-points\."(.*)"\]\n {4}(\w+) = "(.*)"$', source, re.MULTILINE)
    (command,) = re.findall(r"`armature run (train-vlm/colors --set .*?)`", " ".join(source.split()))
    files = {
        EXAMPLE.name: source,
        "own_environment-1.dist-info/METADATA": "Metadata-Version: 2.1\nName: own-environment\nVersion: 1\n",
        "own_environment-1.dist-info/entry_points.txt": "[{}]\n{} = {}\n".format(*entry),
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    script = (
        "import json, sys\n"
        "from armature import load_recipe\n"
        "from armature.components.environments.make import make_environment\n"
        "sections = load_recipe(sys.argv[1], sys.argv[3::2]).sections\n"
        "environment, kind = make_environment(sections['environment']), sections['evaluation'].kind_field\n"
        "print(json.dumps([task.payload[kind] for task in environment.tasks('heldout')]))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, *command.split()],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": f"{ROOT}:{tmp_path}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == ["light", "dark"] * 128
