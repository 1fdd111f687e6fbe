"""The training program, started again when it dies, and what its history says while it runs."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from components.contracts.errors import ArmatureError, TrainerError
from components.contracts.machine import Machine
from components.contracts.stages import Events
from components.process import Program
from components.rl.history import History
from components.training.errors import rebuild
from components.vla.job import Job

MAX_RESTARTS = 3
POLL = 0.2
BAR = "Training"
SHOWN = {
    "loss": "loss",
    "loss/flow": "flow",
    "loss/cross_entropy": "ce",
    "learning_rate/action_expert": "lr",
    "grad_norm": "grad",
    "samples_per_second": "samples/s",
    "memory/peak_gib": "GiB",
    "heldout/action_error": "error",
}
"""Keys of the history, and their names beside the progress bar."""


def carry_out(job: Job, machine: Machine, events: Events) -> None:
    """Run `job` to its end; a program that dies is started again and goes on from its newest checkpoint.

    Raises:
        ArmatureError: what a process of the training raised.
        TrainerError: the training dies again and again.
    """
    job.workspace.mkdir(parents=True, exist_ok=True)
    file = job.workspace / "job.json"
    file.write_text(job.model_dump_json(indent=1))
    follower, deaths, reached = _Follower(job, events), 0, -1
    while True:
        for rank in range(job.processes):
            job.error(rank).unlink(missing_ok=True)
        program = _start(job, machine, file)
        try:
            while program.returncode is None:
                time.sleep(POLL)
                follower.report()
        finally:
            program.stop()
        follower.report()
        if program.returncode == 0:
            return
        if (error := _said(job)) is not None and not isinstance(error, TrainerError):
            raise error
        deaths = deaths + 1 if follower.step <= reached else 1
        reached = follower.step
        if deaths > MAX_RESTARTS:
            raise error or TrainerError(
                f"the training died {deaths} times after step {reached} (exit code {program.returncode}); "
                f"its log ends:\n{program.tail()}",
                where=str(program.log),
                remedy="run the same command again to go on from the last checkpoint",
            )
        events.message(f"the training died after step {reached} (exit code {program.returncode}); starting it again")


def _start(job: Job, machine: Machine, file: Path) -> Program:
    env: dict[str, str | None] = dict(machine.trainer_environment)
    if job.gpus:
        env["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, job.gpus))
    if job.threads:
        env["OMP_NUM_THREADS"] = str(job.threads)
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={job.processes}"]
    if job.processes == 1:  # needs nobody to bring it together with others, and is there sooner
        launcher, env = [], env | {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    command = [sys.executable, *launcher, "-m", "components.vla.run", str(file)]
    return Program(command, log=job.workspace / "training.log", env=env)


def _said(job: Job) -> ArmatureError | None:
    """What ended the training, if a process said so: its cause rather than what it did to the other processes."""
    files = [job.error(rank) for rank in range(job.processes)]
    errors = [rebuild(json.loads(file.read_text())) for file in files if file.exists()]
    return min(errors, key=lambda error: isinstance(error, TrainerError), default=None)


class _Follower:
    """Reports steps that the history did not have before."""

    def __init__(self, job: Job, events: Events) -> None:
        self._history, self._events = History(job.history), events
        self._total, self._size = job.settings.training.max_steps, -1
        self.step = -1

    def report(self) -> None:
        size = self._history.path.stat().st_size if self._history.path.exists() else 0
        if size == self._size:
            return
        self._size = size
        for row in self._history.read():
            if row["step"] > self.step:
                self.step = int(row["step"])
                self._show(row)

    def _show(self, row: Mapping[str, float]) -> None:
        self._events.metrics({name: value for name, value in row.items() if name != "step"}, self.step)
        shown = {short: row[name] for name, short in SHOWN.items() if name in row}
        self._events.progress(BAR, self.step, self._total, **shown)
