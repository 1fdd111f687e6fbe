"""Several `armature run` of one folder without a platform: at the same moment, and after a kill."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.end_to_end.conftest import ROOT

GAMES = 'flow = "alfworld-games"\nextends = "alfworld-games/generated"\n[games]\n'

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


class Folder:
    """An empty folder with two recipes, one that takes seconds and one that takes many minutes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.runs: list[subprocess.Popen[str]] = []
        (path / "short.toml").write_text(GAMES + "train = 1\nvalid_seen = 1\nvalid_unseen = 1\n")
        (path / "long.toml").write_text(GAMES + "train = 20000\n")

    def start(self, recipe: str) -> subprocess.Popen[str]:
        """Start a run in a process group of its own."""
        environment = {key: value for key, value in os.environ.items() if not key.startswith(("PREFECT_", "MLFLOW_"))}
        started = subprocess.Popen(
            [sys.executable, "-m", "armature", "run", recipe],
            cwd=self.path, env=environment | {"PYTHONPATH": str(ROOT)}, text=True, start_new_session=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        self.runs.append(started)
        return started

    def state(self, run: str) -> str:
        """Return the state of a flow run in Prefect's database."""
        with sqlite3.connect(self.path / ".armature/prefect/prefect.db", timeout=60) as database:
            query = "SELECT state_type FROM flow_run WHERE replace(id, '-', '') = ?"
            return str(database.execute(query, [run.replace("-", "")]).fetchone()[0])

    def flow_run_of(self, process: subprocess.Popen[str]) -> str:
        """Wait until a process has begun its flow, and return the flow run's id.

        The kernel names the process that holds the lock of a file in /proc/locks.
        """
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline and process.poll() is None:
            locks = Path("/proc/locks").read_text().splitlines()
            holders = {line.split()[5].rpartition(":")[2]: line.split()[4] for line in locks}
            for file in (self.path / ".armature/flow-runs").glob("*.lock"):
                if holders.get(str(file.stat().st_ino)) == str(process.pid):
                    return file.stem
            time.sleep(0.2)
        raise AssertionError(process.communicate(timeout=5)[0] if process.poll() is not None else "no flow run")


def kill(process: subprocess.Popen[str]) -> None:
    """Kill a run with its whole process group, as the kernel does when memory is short."""
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@pytest.fixture
def folder(tmp_path) -> Iterator[Folder]:
    made = Folder(tmp_path)
    yield made
    for run in made.runs:
        if run.poll() is None:
            kill(run)


def test_two_first_runs_of_a_folder_both_succeed(folder):
    """Each starts a Prefect server, which creates the tables of the same database, and writes the same MLflow."""
    both = [folder.start("short.toml"), folder.start("short.toml")]
    outputs = [run.communicate(timeout=200)[0] for run in both]
    assert [run.returncode for run in both] == [0, 0], outputs
    assert not list((folder.path / ".armature/flow-runs").iterdir())


def test_second_run_says_which_process_it_waits_for(tmp_path):
    holder = (
        "import sys; from pathlib import Path\n"
        "from armature.components.machine.private_files import database_lock\n"
        "with database_lock(Path(sys.argv[1])): print('held', flush=True), sys.stdin.read()"
    )
    command = [sys.executable, "-c", holder, tmp_path / "state/some.db"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout is not None and first.stdout.readline() == "held\n"
        with subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as second:
            assert second.stderr is not None
            line = second.stderr.readline()
            assert str(first.pid) in line and str(tmp_path / "state") in line
            first.communicate()
            assert second.stderr.read() == "" and second.wait() == 0


@pytest.mark.skipif(sys.platform != "linux", reason="/proc/locks names the process that holds a lock")
def test_next_run_sets_a_killed_run_to_crashed_and_no_living_one(folder):
    killed, living = folder.start("long.toml"), folder.start("long.toml")
    ids = [folder.flow_run_of(killed), folder.flow_run_of(living)]
    kill(killed)
    assert [folder.state(each) for each in ids] == ["RUNNING", "RUNNING"]
    following = folder.start("short.toml")
    output = following.communicate(timeout=200)[0]
    assert following.returncode == 0, output
    assert [folder.state(each) for each in ids] == ["CRASHED", "RUNNING"]
