"""README's Python trains a tiny model on a server that it starts."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

README = Path(__file__).resolve().parents[2] / "README.md"


@pytest.mark.slow
def test_python_in_readme_learns_the_colors(tmp_path: Path) -> None:
    (script,) = re.findall(r"^```python\n(.*?)^```", README.read_text(), re.MULTILINE | re.DOTALL)
    paths = os.pathsep.join([str(README.parent), os.environ.get("PYTHONPATH", "")])
    command, environment = [sys.executable, "-c", script], os.environ | {"PYTHONPATH": paths}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    accuracy = re.search(r"^accuracy ([\d.]+); weights in outputs/final$", done.stdout, re.MULTILINE)
    assert accuracy is not None and float(accuracy[1]) > 0.3, done.stdout  # a guess is right one time in 8
    assert (tmp_path / "outputs/final/model.safetensors").is_file()


def test_python_in_readme_fits_twelve_lines_with_numbered_remarks() -> None:
    text = README.read_text()
    (script,) = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    assert len(script.splitlines()) <= 12
    numbers = re.findall(r"# \((\d)\)", script)
    assert numbers == re.findall(r"^(\d)\. ", text, re.MULTILINE)
