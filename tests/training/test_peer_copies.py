"""Sums over GPUs by copy engines, against those of numbers that each rank can make by itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from armature.components.training.peer_copies import peer_copies
from armature.components.training.processes import TrainerProcesses, private_folder
from armature.components.training.ranks import Ranks

SCRIPT = """
import sys, torch
from armature.components.training.launch import joined
from armature.components.training.peer_copies import LANES, PIECE, peer_copies
from armature.components.training.processes import TrainerProcesses

n = int(sys.argv[2])
with joined(TrainerProcesses(processes=n, gpus=tuple(range(n))), seed=0) as ranks:
    peers = peer_copies(ranks)
    assert peers is not None
    random = torch.Generator(ranks.device).manual_seed(0)
    square = torch.randn(4096, 4096, device=ranks.device)
    sizes = [1, 2, 3, 2**22, 2**22 + 1, PIECE - 1, PIECE, PIECE + 1, (2 * LANES + 1) * PIECE + 5] * 2
    summed, expected = [], []
    for number, size in enumerate(sizes):
        # Whole numbers, so that no order of sums rounds.
        parts = [torch.randint(-(2**20), 2**20, (size,), generator=random, device=ranks.device) for _ in range(n)]
        expected.append(sum(parts).float())
        own = parts[ranks.rank].float()
        for _ in range(number * (20 if ranks.first else 1)):  # the GPUs are never at the same place
            square @ square
        summed.append((own, peers.begin_sum(own)))
    for (total, wait), truth in zip(summed, expected, strict=True):
        wait()
        assert torch.equal(total, truth), len(truth)
    right = []
    for _ in range(200):  # without a wait of the host
        one = torch.full((2**22,), 1.0, device=ranks.device)
        peers.begin_sum(one)()
        peers.begin_sum(one)()
        right.append(one.eq(n * n).all())
    assert torch.stack(right).all()
    if ranks.first:
        open(sys.argv[1], "w").write("done")
"""


def test_on_a_cpu_there_are_none() -> None:
    assert peer_copies(Ranks()) is None


@pytest.mark.parametrize("n", [pytest.param(n, marks=pytest.mark.gpu(n)) for n in (2, 4)])
@pytest.mark.timeout(200)
def test_gpus_sum_to_the_bit(n: int, tmp_path: Path) -> None:
    script, told = tmp_path / "ranks.py", tmp_path / "told"
    script.write_text(SCRIPT)
    processes, rendezvous = TrainerProcesses(processes=n, gpus=tuple(range(n))), private_folder(tmp_path / "rendezvous")
    program = processes.start([script, told, str(n)], rendezvous=rendezvous, log=tmp_path / "log")
    try:
        assert program.wait(180) == 0, program.tail(40)
    finally:
        program.stop()
    assert told.read_text() == "done"
