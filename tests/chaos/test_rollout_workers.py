"""A training whose rollouts are collected by workers, of which some are killed, ends with the same weights."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from armature.drill.runs import DrilledRun
from tests.chaos.colors import STEPS, colors_run, make_colors_inputs, processes_of

KILLED_AFTER = (1, 4, 6)
"""Training steps after each of which one rollout worker is killed."""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def tables(training: DrilledRun) -> list[list[dict[str, Any]]]:
    """Return the rows of each step's rollouts, without the columns of measured times."""
    files = sorted((training.store / "rollouts").glob("*/rollouts.parquet"))
    return [pq.read_table(file).drop_columns(["generate_seconds", "environment_seconds"]).to_pylist() for file in files]


def test_rollout_workers_give_the_results_of_one_process(tmp_path: Path) -> None:
    inputs = make_colors_inputs(tmp_path / "inputs")
    alone = colors_run(tmp_path / "alone", inputs)
    assert alone.start().wait() == 0, alone.log.read_text()[-4000:]
    workers = colors_run(tmp_path / "workers", inputs, "workers.rollouts=2")
    process = workers.start()
    for step in KILLED_AFTER:
        while workers.steps_done() < step:
            assert process.returncode is None, workers.log.read_text()[-4000:]
            time.sleep(0.05)
        random.choice(processes_of(workers.mark, "rollout worker")).kill()
    assert process.wait() == 0, workers.log.read_text()[-4000:]
    assert "is collected again" in workers.log.read_text()
    assert len(tables(workers)) == STEPS and tables(workers) == tables(alone)
    assert workers.results() == alone.results()
    assert not list((workers.store / "rollout-shards").glob("*"))
