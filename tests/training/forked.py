"""A program that trains the cases of test_sharding on any number of ranks, once per request.

It forks the ranks, because importing torch and transformers in each of them would take longer than the steps. A request
is a line of JSON, [processes, rendezvous, cases]; the reply is the exit code of the first rank that fails, or 0. Other
tests pass another function `work` for the ranks.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import torch

from armature.components.machine.network import loopback
from armature.components.training import gradient_sums
from armature.components.training.processes import RENDEZVOUS, TrainerProcesses, private_folder
from armature.components.training.ranks import joined
from armature.components.training.service_settings import ServiceSettings
from armature.components.vlm.worker import TrainerWorker

FIRST_NEEDED_IN_A_RANK = ("pandas", "pyarrow.dataset", "transformers.models.qwen2_vl.processing_qwen2_vl")
"""Modules to import before the fork, because each forked rank would otherwise import them itself. pyarrow imports
pandas."""


def train(file: str) -> None:
    """Train the cases in `file` as one rank, and write their results."""
    read = json.loads(Path(file).read_text())
    cases = [(ServiceSettings.model_validate(settings), batches) for settings, batches in read]
    with joined(cases[0][0].processes, cases[0][0].seed) as ranks:
        for settings, batches in cases:
            torch.manual_seed(settings.seed)
            worker = TrainerWorker(settings, ranks)
            done = worker.run({"name": "resume"}, [])
            results = []
            for step, batch in enumerate(batches, 1):
                command = {"name": "step", "step": step, "batch": batch}
                if step > done:
                    results.append(worker.run(command, worker.check(command)))
            score = {"name": "score", "batch": batches[0]}
            scores = worker.run(score, worker.check(score))
            worker.run({"name": "save"}, [])
            worker.run({"name": "settle"}, [])
            worker.run({"name": "publish", "folder": str(settings.workspace / "out"), "version": 0}, [])
            if ranks.first:
                (settings.workspace / "results.json").write_text(json.dumps([results, scores]))


def fork(rank: int, processes: int, rendezvous: str, cases: str, work: Callable[[str], None]) -> int:
    """Fork a process that calls `work` with the file `cases` as rank `rank`. Return its PID."""
    if child := os.fork():
        return child
    try:
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(processes))
        os.environ.update({RENDEZVOUS: f"{rendezvous}/store", "GLOO_SOCKET_IFNAME": loopback()})
        work(cases)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def run(processes: int, rendezvous: str, cases: str, work: Callable[[str], None] = train) -> int:
    ranks = {fork(rank, processes, rendezvous, cases, work) for rank in range(processes)}
    failed = 0
    while ranks:
        ended, status = os.wait()
        ranks.discard(ended)
        code = os.waitstatus_to_exitcode(status)
        if code and not failed:  # end the other ranks, which would wait for this one
            failed = code
            for rank in ranks:
                os.kill(rank, signal.SIGKILL)
    return failed


def run_script(folder: Path, script: str) -> tuple[int, str]:
    """Run a script as two ranks on gloo; its argument is `folder`.

    Return its exit code and the end of its log.
    """
    (folder / "script.py").write_text(script)
    rendezvous, arguments = private_folder(folder / "rendezvous"), [folder / "script.py", folder]
    program = TrainerProcesses(processes=2, threads=1).start(arguments, rendezvous=rendezvous, log=folder / "log")
    try:
        return program.wait(120), program.tail(60)
    finally:
        program.stop()


def serve(work: Callable[[str], None] = train) -> None:
    gradient_sums.ALONE_ELEMENTS = 64  # the matrices of a tiny model are large enough to be summed early
    for name in FIRST_NEEDED_IN_A_RANK:
        import_module(name)
    gc.freeze()
    for line in sys.stdin:
        print(run(*json.loads(line), work), flush=True)


if __name__ == "__main__":
    serve()
