"""Gradients that two gloo ranks sum during the backward pass, compared with sums by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from .forked import run_script

SCRIPT = """
import sys, torch, torch.distributed as dist
from torch import nn
from armature.components.training import gradient_sums, ranks as ranks_module
from armature.components.training.engine import ParameterGroup, TrainingEngine
from armature.components.training.ranks import joined
from armature.components.training.processes import TrainerProcesses

ranks_module.ALONE_ELEMENTS = gradient_sums.ALONE_ELEMENTS = 64  # matrices are large here, vectors are small
FIRST, SECOND, THIRD, LATE = range(4)

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.table = nn.Embedding(16, 8)
        self.turned = nn.Parameter(torch.randn(8, 9).T)  # its gradient is not contiguous
        self.bfloat16()

    def forward(self, ids, used):
        x = self.table(ids)
        for i in used:
            x = self.layers[i](x).tanh()
        x = x + (x @ self.turned.T).tanh() @ self.turned
        return (x @ self.table.weight.T).float().log_softmax(-1).square().mean()

def engine_of(ranks):
    model = Model()
    group = ParameterGroup("all", list(model.parameters()), lambda at: 0.01, 0.1)
    return TrainingEngine(
        model, [group], ranks, sharded=False, betas=(0.9, 0.95), eps=1e-8, max_grad_norm=1.0, masters=True
    )

begun, waited = [], []
all_reduce = dist.all_reduce

class Work:
    def __init__(self, work):
        self.work = work

    def wait(self):
        waited.append(self)
        return self.work.wait()

def counting(tensor, *args, async_op=False, **kwargs):
    assert tensor.is_contiguous()
    work = all_reduce(tensor, *args, async_op=async_op, **kwargs)
    if async_op:
        begun.append(Work(work))
        return begun[-1]

dist.all_reduce = counting
BOTH = [[FIRST, SECOND, THIRD], [FIRST, SECOND, THIRD, LATE]]
UPDATES = [  # per update: the layers of each micro-batch on each rank, and the sums that each rank starts early
    ((BOTH, BOTH), (0, 0)),
    ((BOTH, BOTH), (6, 6)),
    ((BOTH, [[FIRST, SECOND, LATE], [FIRST, THIRD]]), (6, 1)),
    (([[FIRST]], [[FIRST, THIRD]]), (1, 1)),
    (([[FIRST, SECOND]], [[FIRST, SECOND]]), (3, 3)),
    ((BOTH, BOTH), (4, 4)),
    ((BOTH, BOTH), (6, 6)),
]

with joined(TrainerProcesses(threads=1, ready_timeout=60), seed=0) as ranks:
    ours, plain = engine_of(ranks), engine_of(ranks)
    found = {}

    def keep(*_):
        found.clear()
        found.update({i: p.grad.clone() for i, p in enumerate(ours.trained) if p.grad is not None})

    ours.optimizer.register_step_pre_hook(keep)
    random = torch.Generator().manual_seed(ranks.rank)
    for number, (used, expected) in enumerate(UPDATES, 1):
        own = [torch.randint(16, (3, 5), generator=random) for _ in used[ranks.rank]]
        begun.clear()
        waited.clear()
        for i, (ids, layers) in enumerate(zip(own, used[ranks.rank]), 1):
            ours.backward(ours.model(ids, layers), last=i == len(own))
            assert i == len(own) or not begun
            plain.backward(plain.model(ids, layers))
        assert len(begun) == expected[ranks.rank], (number, ranks.rank, begun)

        totals = plain._sums.totals
        parts = ranks.gather({i: totals[p].clone() for i, p in enumerate(plain.trained) if p in totals})
        ours.update(number)
        assert waited == begun
        plain.update(number)
        assert found.keys() == set().union(*parts), number
        for i, gradient in found.items():
            by_hand = sum(part[i] for part in parts if i in part)
            assert gradient.dtype == torch.float32 and torch.equal(gradient, by_hand), (number, i)
        for one, other in zip(ours.trained, plain.trained):
            assert torch.equal(one, other) and one.grad is None

    def refused(what, *args, **kwargs):
        try:
            what(*args, **kwargs)
        except RuntimeError:
            return
        raise SystemExit(f"{what} was allowed")

    ours.backward(ours.model(own[0], [FIRST]))
    ours.backward(ours.model(own[0], [FIRST]))
    ours.discard()
    begun.clear()
    ours.backward(ours.model(own[0], BOTH[1]), last=True)
    assert len(begun) == 6
    refused(ours.backward, ours.model(own[0], BOTH[1]))
    refused(ours.backward, ours.model(own[0], BOTH[1]), last=True)
    refused(ours.discard)
"""


@pytest.mark.slow
def test_overlapped_sums_equal_sums_after_backward(tmp_path: Path) -> None:
    """The layers that get gradients differ between ranks, between micro-batches and between updates."""
    code, log = run_script(tmp_path, SCRIPT)
    assert code == 0, log
