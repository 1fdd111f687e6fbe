"""examples/trainer.py and examples/trainer.ipynb train on a server that is up, and learn."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
KERNEL = """
import asyncio, json, runpy, sys
from urllib.parse import urlsplit

script, notebook, url = sys.argv[1:]
cells = [cell for cell in json.load(open(notebook))["cells"] if cell["cell_type"] == "code"]
port = urlsplit(url).port
names = {}


async def main():
    for cell in cells:
        parameters = "parameters" in cell["metadata"].get("tags", ())
        exec(f"port = {port}" if parameters else "".join(cell["source"]), names)


asyncio.run(main())  # in a kernel, a loop is running
print(json.dumps(names["metrics"]))
sys.argv = [script, "tiny-colors", str(port)]
runpy.run_path(script, run_name="__main__")
"""


@pytest.mark.slow
def test_script_and_notebook_learn_the_colors(joined_url: str, tmp_path: Path) -> None:
    """The notebook plays the held-out tasks with transformers as well, which has to find what the server did."""
    command = [sys.executable, "-c", KERNEL, EXAMPLES / "trainer.py", EXAMPLES / "trainer.ipynb", joined_url]
    paths = os.pathsep.join([str(EXAMPLES.parent), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"MPLBACKEND": "agg", "PYTHONPATH": paths}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (metrics,) = (json.loads(line) for line in done.stdout.splitlines() if line.startswith("{"))
    assert metrics["mismatch_kl"] < 1e-3 and metrics["policy_version/max"] == 9

    lines = (tmp_path / "outputs/notebook/history.jsonl").read_text().splitlines()
    measured = {row["step"]: row["heldout/accuracy"] for row in map(json.loads, lines) if "heldout/accuracy" in row}
    assert measured.keys() == {0, 5, 10} and max(measured.values()) > measured[0] + 0.2
    result = re.search(r"held-out accuracy ([\d.]+); the server measured ([\d.]+)", done.stdout)
    assert result is not None and float(result[1]) == pytest.approx(max(measured.values()), abs=0.02), done.stdout

    accuracy = re.search(r"^accuracy ([\d.]+); the model is in outputs/trainer/final", done.stdout, re.MULTILINE)
    assert accuracy is not None and float(accuracy[1]) > 0.3, done.stdout  # a guess is right one time in 8
    assert (tmp_path / "outputs/trainer/final/model.safetensors").is_file()


def test_notebook_contains_no_machine_path() -> None:
    text = (EXAMPLES / "trainer.ipynb").read_text()
    assert not re.search(r"/(?:home|root|Users|tmp|work)/|[A-Z]:\\\\", text)
