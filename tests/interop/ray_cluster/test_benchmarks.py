"""The benchmark of rollouts by workers, with few episodes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_collects_episodes_on_cluster_and_locally() -> None:
    command = [sys.executable, "-m", "benchmarks.rollout_workers", "16"]
    done = subprocess.run(command, cwd=Path(__file__).parents[3], stdout=subprocess.PIPE, text=True, check=True)
    rows = json.loads(done.stdout.splitlines()[-1])
    assert rows and all(row["baseline"] > 0 for row in rows)
