"""`armature drill` finds a reward that remembers too little, and an interruption ends all that it has started."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import psutil
import pyarrow.parquet as pq
import pytest

from armature.drill.drill import Drill
from armature.drill.faults import Fault
from armature.init import write_project

REWARD = '''
import os
from pathlib import Path

import psutil

FOLDER, MARK = Path({folder!r}), os.environ.get("ARMATURE_DRILL", "none")
PROCESSES = [psutil.Process(), *psutil.Process().parents()]
RUN = next((each.pid for each in PROCESSES if each.cmdline()[1:4] == ["-m", "armature", "stage"]), 0)
(FOLDER / f"{{MARK}}-{{RUN}}").touch()
RESTARTED = len(list(FOLDER.glob(f"{{MARK}}-*"))) > 1


def short(completion: str) -> float:
    """The planted fault: another reward after the run was started again."""
    return len(completion.split()) + 10.0 * RESTARTED
'''

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]


def rewards(store: Path) -> dict[int, list[float]]:
    """Return the rewards of each step's rollouts."""
    files = store.glob("rollouts/*/rollouts.parquet")
    return {int(file.parent.name[-5:]): pq.read_table(file)["reward"].to_pylist() for file in files}


def test_first_step_after_a_planted_fault_is_named(tmp_path: Path) -> None:
    project = tmp_path / "project"
    write_project(project)
    (tmp_path / "starts").mkdir()
    (project / "reward.py").write_text(REWARD.format(folder=str(tmp_path / "starts")))
    with ExitStack() as stack:
        changes = ["model.tiny.format.steps=20"]
        drilled = Drill(str(project / "recipe.toml"), changes, tmp_path / "drill", 25, stack)
        drilled.leave_alone()
        assert drilled.disturb("without-a-start", False, [Fault("kill", "rank", 2, 0.1, 0.0)]) == ""
        difference = drilled.disturb("killed", False, [Fault("kill", "run", 4, 0.1, 0.0)])
    alone, killed = (rewards(tmp_path / "drill" / name / "store") for name in ("undisturbed", "killed"))
    first = min(step for step in alone if alone[step] != killed[step])
    assert 4 < first < 7 and difference.startswith(f"step {first}, rollouts: reward: ")
    assert not (tmp_path / "drill/without-a-start").exists()


def test_interruption_ends_and_removes_everything(tmp_path: Path) -> None:
    folder = tmp_path / "new"
    command = [sys.executable, "-m", "armature", "drill", "--folder", str(folder), "--runs", "1"]
    process = subprocess.Popen(command, start_new_session=True)
    while not list(folder.glob("undisturbed/store/workspaces/*/history.jsonl")):
        assert process.poll() is None
        time.sleep(0.2)
    started = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 130
    assert started and not psutil.wait_procs(started, timeout=20)[1]
    assert not folder.exists()
