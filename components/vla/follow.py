"""The training program on the first node, started again when it dies, and what its history says while it runs."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from typing import Literal

from components.artifacts.history import History
from components.contracts.errors import ArmatureError, TrainerError
from components.contracts.stages import Events
from components.training.errors import rebuild
from components.vla.job import TrainingJob
from components.vla.nodes import Attempt, NodeHeartbeats, start

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


def carry_out(job: TrainingJob, events: Events) -> None:
    """Run `job` to its end; a program that dies is started again and resumes from its newest checkpoint.

    On several nodes this is the first. When the program dies on one it is ended and started again on all.

    Raises:
        ArmatureError: what a process of the training raised.
        TrainerError: the training dies again and again.
    """
    job.workspace.mkdir(parents=True, exist_ok=True)
    job.file.write_text(job.model_dump_json(indent=1))
    if job.nodes > 1:
        events.message(f"{job.nodes} nodes train; run on each other one: armature join {job.file}")
    result: Literal["done", "failed"] = "failed"
    try:
        _run(job, events)
        result = "done"
    finally:
        if (last := Attempt.newest(job.workspace)) is not None:
            Attempt(number=last.number, result=result).tell(job.workspace)


def _run(job: TrainingJob, events: Events) -> None:
    follower, deaths, reached = _Follower(job, events), 0, -1
    log = job.workspace / "training.log"
    while True:
        for rank in range(job.ranks):
            job.error(rank).unlink(missing_ok=True)
        before = Attempt.newest(job.workspace)
        attempt = Attempt(number=before.number + 1 if before else 1).open(job.workspace)
        signs, lost = NodeHeartbeats(job, attempt), None
        program = start(job, attempt, 0, log=log)
        try:
            while program.returncode is None and lost is None:
                time.sleep(POLL)
                follower.report()
                lost = signs.lost()
        finally:
            program.stop()
        follower.report()
        if program.returncode == 0:
            return
        end = signs.lost() or f"exit code {program.returncode}"
        if (error := _said(job)) is not None and not isinstance(error, TrainerError):
            raise error
        deaths = deaths + 1 if follower.step <= reached else 1
        reached = follower.step
        if deaths > MAX_RESTARTS:
            raise error or TrainerError(
                f"the training died {deaths} times after step {reached} ({end}); its log ends:\n{program.tail()}",
                where=str(log),
                remedy="run the same command again to resume from the last checkpoint",
            )
        events.message(f"the training died after step {reached} ({end}); starting it again")


def _said(job: TrainingJob) -> ArmatureError | None:
    """What ended the training, if a process said so: its cause rather than what it did to the other processes."""
    files = [job.error(rank) for rank in range(job.ranks)]
    errors = [rebuild(json.loads(file.read_text())) for file in files if file.exists()]
    return min(errors, key=lambda error: isinstance(error, TrainerError), default=None)


class _Follower:
    """Reports steps that the history did not have before."""

    def __init__(self, job: TrainingJob, events: Events) -> None:
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
