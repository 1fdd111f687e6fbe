"""Ranks that divide experts train as one rank that has them all, with uneven numbers of tokens on the ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from armature.components.models.expert_parallel import split_experts
from armature.components.training.ranks import Ranks
from tests.refusals import refused
from tests.vlm.conftest import Tiny

from .forked import run_script
from .test_sharding import Result, Runs, largest_difference, started

NAMES = ("full", "lora", "one sample, packed", "shared", "even, packed, bfloat16")


@pytest.fixture(scope="module")
def runs(make_tiny: Callable[..., Tiny], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    with started(make_tiny("qwen3-vl-moe"), tmp_path_factory.mktemp("experts")) as runs:
        yield runs


@pytest.fixture(scope="module")
def one_rank(runs: Runs) -> dict[str, Result]:
    return runs.run(NAMES, processes=1, most_batches=2)


@pytest.fixture(scope="module")
def two_ranks(runs: Runs) -> dict[str, Result]:
    return runs.run(NAMES, processes=2, most_batches=2, experts=True)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", NAMES)
def test_divided_experts_train_as_on_one_rank(
    name: str, one_rank: dict[str, Result], two_ranks: dict[str, Result]
) -> None:
    one, two = one_rank[name], two_ranks[name]
    rounded = "bfloat16" in name
    assert len(one.metrics) == len(two.metrics)
    for ours, theirs in zip(two.metrics, one.metrics, strict=True):
        for metric in ("loss", "grad_norm"):
            assert ours[metric] == pytest.approx(theirs[metric], rel=0.02 if rounded else 1e-4, abs=1e-6), metric
    if not rounded:
        assert largest_difference(one, two) < 1e-5
        for a, b in zip(one.scores, two.scores, strict=True):
            torch.testing.assert_close(torch.tensor(a), torch.tensor(b), atol=1e-5, rtol=0)


PRODUCTS = """
import sys, torch
from copy import deepcopy
from pathlib import Path
from torch import nn
from transformers.models.qwen3_vl_moe.configuration_qwen3_vl_moe import Qwen3VLMoeTextConfig
from transformers.models.qwen3_vl_moe.modeling_qwen3_vl_moe import Qwen3VLMoeTextExperts
from armature.components.models.expert_parallel import split_experts
from armature.components.training.processes import TrainerProcesses
from armature.components.training.ranks import joined

WIDTHS = {"hidden_size": 16, "num_experts": 6, "moe_intermediate_size": 8, "num_experts_per_tok": 2}

def differences(counts, candidates):
    random = torch.Generator().manual_seed(0)
    plain = nn.ModuleList([Qwen3VLMoeTextExperts(Qwen3VLMoeTextConfig(**WIDTHS))]).double()
    for parameter in plain.parameters():
        nn.init.normal_(parameter, std=0.3, generator=random)
    split = deepcopy(plain)
    plain[0].config._experts_implementation = "eager"
    new = split_experts(split, mesh)
    for parameter, old in zip(split.parameters(), plain.parameters(), strict=True):
        assert parameter in new and parameter.to_local().shape[0] == 3
        parameter.data.to_local().copy_(old.data[3 * ranks.rank : 3 * ranks.rank + 3])
    total, first = sum(counts), sum(counts[: ranks.rank])
    mine = slice(first, first + counts[ranks.rank])
    hidden = torch.randn(total, 16, generator=random, dtype=torch.float64)
    weights = torch.rand(total, 2, generator=random, dtype=torch.float64)
    chosen = torch.rand(total, candidates, generator=random).argsort(-1)[:, :2]
    results = []
    for module, rows in ((plain[0], slice(0, total)), (split[0], mine)):
        leaves = [hidden[rows].clone().requires_grad_(), weights[rows].clone().requires_grad_()]
        out = module(leaves[0], chosen[rows], leaves[1])
        (out * torch.linspace(-1, 1, 16, dtype=torch.float64)).sum().backward()
        results.append([out.detach(), *(leaf.grad for leaf in leaves), *(p.grad for p in module.parameters())])
    whole, part = results
    for expected, value in zip(whole[:3], part[:3], strict=True):
        yield (value - expected[mine]).abs().max() if len(value) else torch.zeros(())
    for expected, value in zip(whole[3:], part[3:], strict=True):  # the mean over two ranks
        assert value.placements[0].is_shard(0)
        yield (2 * value.full_tensor() - expected).abs().max()

with joined(TrainerProcesses(processes=2, threads=1, ready_timeout=60), seed=0) as ranks:
    mesh = ranks.mesh(1)
    for counts, candidates in (((5, 9), 6), ((7, 0), 6), ((4, 4), 3)):  # in the last case rank 1 has no work
        assert max(differences(counts, candidates)) < 1e-13, counts
    (Path(sys.argv[1]) / f"done-{ranks.rank}").touch()
"""


@pytest.mark.slow
def test_outputs_and_gradients_are_those_of_the_loop_over_all_experts(tmp_path: Path) -> None:
    code, log = run_script(tmp_path, PRODUCTS)
    assert code == 0 and len([*tmp_path.glob("done-*")]) == 2, log


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield Ranks(0, 2)
    dist.destroy_process_group()


@pytest.mark.parametrize(("count", "code"), [(5, "experts_not_divided"), (0, "experts_missing")])
def test_refuses_experts_that_cannot_be_divided(count: int, code: str, ranks: Ranks) -> None:
    model = nn.Module()
    if count:
        model.gate_up_proj = nn.Parameter(torch.zeros(count, 2, 1))
        model.down_proj = nn.Parameter(torch.zeros(count, 1, 1))
    with refused(code, "machine.trainer"):
        split_experts(model, ranks.mesh(1))
