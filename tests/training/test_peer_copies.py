"""Sums over GPUs by copy engines, against those of numbers that each rank can make by itself."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from components.training.peer_copies import peer_copies
from components.training.processes import TrainerProcesses, private_folder
from components.training.ranks import Ranks

SCRIPT = """
import sys, torch
from components.training.launch import joined
from components.training.peer_copies import LANES, PIECE, peer_copies
from components.training.processes import TrainerProcesses

with joined(TrainerProcesses(processes=2, gpus=(0, 1)), seed=0) as ranks:
    peers = peer_copies(ranks)
    assert peers is not None
    random = torch.Generator(ranks.device).manual_seed(0)
    square = torch.randn(4096, 4096, device=ranks.device)
    sizes = [1, 2, 3, 2**22, 2**22 + 1, PIECE - 1, PIECE, PIECE + 1, (2 * LANES + 1) * PIECE + 5] * 2
    summed, expected = [], []
    for number, size in enumerate(sizes):
        parts = [torch.randn(size, generator=random, device=ranks.device) for _ in range(2)]
        expected.append(parts[0] + parts[1])
        for _ in range(number * (20 if ranks.first else 1)):  # the GPUs are never at the same place
            square @ square
        summed.append((parts[ranks.rank], peers.begin_sum(parts[ranks.rank])))
    for (total, wait), truth in zip(summed, expected, strict=True):
        wait()
        assert torch.equal(total, truth), len(truth)
    right = []
    for _ in range(200):  # without a wait of the host
        one = torch.full((2**22,), 1.0, device=ranks.device)
        peers.begin_sum(one)()
        peers.begin_sum(one)()
        right.append(one.eq(4).all())
    assert torch.stack(right).all()
    if ranks.first:
        open(sys.argv[1], "w").write("done")
"""

DYING = """
import os, signal, sys, torch
from components.training.launch import joined
from components.training.peer_copies import peer_copies
from components.training.processes import TrainerProcesses

with joined(TrainerProcesses(processes=2, gpus=(0, 1)), seed=0) as ranks:
    peers = peer_copies(ranks)
    assert peers is not None
    if not ranks.first:
        os.kill(os.getpid(), signal.SIGKILL)
    ones = torch.ones(2**24, device=ranks.device)
    peers.begin_sum(ones)()
    open(sys.argv[1], "w").write("waits")
    ones.sum().item()
    open(sys.argv[1], "w").write("has a sum of what nobody sent")
"""


def test_on_a_cpu_there_are_none() -> None:
    assert peer_copies(Ranks()) is None


@pytest.mark.gpu(2)
@pytest.mark.timeout(200)
def test_two_gpus_sum_to_the_bit(tmp_path: Path) -> None:
    assert two_ranks(SCRIPT, tmp_path) == (0, "done")


@pytest.mark.gpu(2)
@pytest.mark.timeout(200)
def test_a_gpu_that_waits_for_a_dead_rank_ends_with_it(tmp_path: Path) -> None:
    assert two_ranks(DYING, tmp_path) == (128 + signal.SIGKILL, "waits")


def two_ranks(script: str, folder: Path) -> tuple[int, str]:
    """The exit code, and what the script says in the file that is its argument."""
    path, told = folder / "ranks.py", folder / "told"
    path.write_text(script)
    processes = TrainerProcesses(processes=2, gpus=(0, 1))
    program = processes.start([path, told], rendezvous=private_folder(folder / "rendezvous"), log=folder / "log")
    try:
        code = program.wait(180)
        print(program.tail(40))
    finally:
        program.stop()
    return code, told.read_text()
