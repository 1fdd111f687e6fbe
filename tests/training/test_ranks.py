"""What ranks tell each other, and how they meet and end; as processes on gloo."""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path

import pytest

from components.training.processes import TrainerProcesses, private_folder

TELL = """
import os, sys, torch
from components.training.launch import joined
from components.training.processes import TrainerProcesses

class Stranger:
    def __reduce__(self):
        return (open, (sys.argv[1], "w"))

with joined(TrainerProcesses(threads=1, ready_timeout=60), seed=0) as ranks:
    value = {"rank": ranks.rank, "text": "é" * (1 + 1000 * ranks.rank), "rows": {3: torch.full((ranks.rank,), 2.5)}}
    for rank, told in enumerate(ranks.gather(value)):
        assert told["rank"] == rank and len(told["text"]) == 1 + 1000 * rank
        assert told["rows"][3].tolist() == [2.5] * rank
    assert ranks.broadcast(["of", None, 0.5] if ranks.first else "not this") == ["of", None, 0.5]
    try:
        ranks.gather(Stranger() if ranks.first else None)
    except Exception as error:
        assert "weights_only" in str(error), error
    else:
        raise SystemExit("a stranger's object was made")
"""
END = """
import os, signal, sys, time
from components.training.launch import joined
from components.training.processes import TrainerProcesses

with joined(TrainerProcesses(threads=1, ready_timeout=60), seed=0) as ranks:
    open(f"{sys.argv[1]}-{ranks.rank}", "w").write(str(os.getpid()))
    ranks.gather(None)
    if ranks.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    ranks.gather(None)
    time.sleep(600)
"""


def run(script: str, folder: Path, argument: Path) -> tuple[int, str]:
    file = folder / "script.py"
    file.write_text(textwrap.dedent(script))
    processes = TrainerProcesses(processes=2, threads=1)
    program = processes.start([file, argument], rendezvous=private_folder(folder / "rendezvous"), log=folder / "log")
    try:
        return program.wait(120), program.tail()
    finally:
        program.stop()


@pytest.mark.slow
def test_ranks_tell_each_other_data_and_make_no_objects(tmp_path: Path) -> None:
    code, log = run(TELL, tmp_path, tmp_path / "made")
    assert code == 0, log
    assert not (tmp_path / "made").exists()


@pytest.mark.slow
def test_a_killed_rank_ends_the_others(tmp_path: Path) -> None:
    code, log = run(END, tmp_path, tmp_path / "pid")
    assert code == 137 and "rank 1 ended with exit code -9" in log, log
    for rank in range(2):
        assert not Path(f"/proc/{(tmp_path / f'pid-{rank}').read_text()}").exists()


def test_one_rank_has_no_parent_and_meets_nobody(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import os; print(*(os.environ[n] for n in ('RANK', 'LOCAL_RANK', 'WORLD_SIZE')))")
    program = TrainerProcesses().start([script], rendezvous=tmp_path, log=tmp_path / "log")
    assert program.command == [sys.executable, str(script)]
    assert program.wait(60) == 0
    assert program.tail() == "0 0 1"
