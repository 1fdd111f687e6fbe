"""Gated DeltaNet in packed rows: log-probs and gradients of separate rows, and leaks if a reset is removed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers.models.qwen3_5 import modeling_qwen3_5
from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe

from armature.components.contracts.batches import Sample
from armature.components.models import packed_delta
from armature.components.models.adapters import model_inputs
from armature.components.models.context_parallel import ContextParallel
from armature.components.models.packed import complete_packing
from armature.components.models.packed_delta import Level, delta_rule, has_fla, torch_rule
from armature.components.training.ranks import Ranks
from armature.components.vlm.learner import Learner
from armature.components.vlm.loader import FeatureCache
from armature.components.vlm.logprobs import Policy
from armature.components.vlm.packing import packed_batch
from tests.refusals import refused

from .conftest import Tiny, trainer_settings
from .test_packing import _sample, apart, conversations, results

DOUBLE, SINGLE = 1e-12, 5e-5


class InDouble:
    """The torch that transformers' module sees, with float64 in place of float32."""

    float = float32 = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


@pytest.fixture(params=["qwen3.5"])
def tiny(request, make_tiny) -> Tiny:
    """A model with three layers of Gated DeltaNet below one of attention, and weights large enough to show a leak."""
    return make_tiny(request.param, layers=4, initializer_range=0.15)


@pytest.fixture
def model(request, tiny, monkeypatch) -> Any:
    """The model in the dtype that the test names, by default in float64. transformers would compute parts in fp32."""
    if getattr(request, "param", DOUBLE) == SINGLE:
        return tiny.model()
    for module in (modeling_qwen3_5, modeling_qwen3_5_moe):
        monkeypatch.setattr(module, "torch", InDouble())
    monkeypatch.setattr(Tensor, "float", Tensor.double)
    return tiny.model().double()


def bushy(tiny: Tiny) -> list[Sample]:
    """Return rows whose shared beginnings form a tree of six levels, with segments of 1 and 2 tokens.

    Rows have two turns with an image in each, or one image, or none; the longest end is more than two chunks of 64.
    """
    chats = conversations(tiny)
    stem, random = chats[0], np.random.default_rng(0)
    ends: list[list[int]] = [[60], [61, 62, 63], [61, 62, 64, 65], [61, 62, 64, 66, 67, 68], [61, 62, 64, 66, 69]]
    ends += [[61, 62, 64, 66, 69, *random.integers(60, 300, 140)], [70, 71, *random.integers(60, 300, 9)]]
    rows = [*chats[1:]]
    for number, end in enumerate(ends):
        ids = np.concatenate([stem.input_ids, np.array(end)])
        mask = np.arange(len(ids)) >= len(stem.input_ids)
        rows.append(_sample(ids, stem.images, f"end {number}", mask, seed=number))
    return rows


def outcomes(tiny: Tiny, model: Any, samples: list[Sample], folder: Any) -> list[tuple[Tensor, dict[str, Tensor]]]:
    """Return log-probs with entropies, and gradients: of the samples packed together, and of each in its own row."""
    policy = Policy(model, logprobs="torch", temperature=1.0, packing=True)
    features = FeatureCache(tiny.collator, tiny.images, folder)
    batch = packed_batch(tiny.collator, samples, features)
    packing = complete_packing(policy.model, model_inputs(batch), batch.grids, batch.packing)
    ours, gradient = results(policy, [(batch, packing)])
    rows = [(tiny.collator.collate_features([sample], features), None) for sample in samples]
    alone, expected = results(policy, rows)
    return [(torch.cat(ours), gradient), (torch.cat([*alone[::2], *alone[1::2]]), expected)]


@pytest.mark.parametrize(("model", "tolerance"), [(DOUBLE, DOUBLE), (SINGLE, SINGLE)], indirect=["model"])
@pytest.mark.parametrize("tiny", ["qwen3.5", "qwen3.5-moe"], indirect=True)
@pytest.mark.parametrize("shared", [True, False], ids=["shared", "apart"])
def test_packed_delta_rows_equal_separate_rows(tolerance, shared, model, tiny, tmp_path):
    samples = bushy(tiny) if shared else apart(bushy(tiny))
    (ours, gradient), (alone, expected) = outcomes(tiny, model, samples, tmp_path)
    assert (ours - alone).abs().max() < tolerance
    assert gradient.keys() == expected.keys()
    norm = torch.stack([value.norm() for value in expected.values()]).norm()
    for name, value in expected.items():
        assert (gradient[name] - value).norm() < 10 * tolerance * value.norm() + tolerance * norm, name


def passed_on(levels: list[Level]) -> list[Level]:
    """Each segment continues from the one before it in the sequence, as it would without a reset."""
    count = sum(len(level.lengths) for level in levels)
    tokens = torch.cat([level.tokens for level in levels])
    owner = torch.repeat_interleave(torch.arange(count), torch.tensor([n for one in levels for n in one.lengths]))
    parts = [tokens[owner == number] for number in range(count)]
    parts.sort(key=lambda part: int(part[0]))
    zero = torch.zeros(1, dtype=torch.int64)
    return [Level(part, (len(part),), zero if n else None) for n, part in enumerate(parts)]


def restarted(levels: list[Level]) -> list[Level]:
    """Every segment begins with an empty state, as a row would."""
    return [Level(torch.cat([one.tokens for one in levels]), tuple(n for one in levels for n in one.lengths), None)]


def run_on(windows: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """The convolution sees the tokens before it in the sequence."""
    tokens, seen, _ = windows
    before = tokens[:, None] + torch.arange(1 - seen.shape[1], 1)
    return tokens, before.clamp(0), before >= 0


def cut_off(windows: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """The convolution sees at most the segment before: not through a segment that is shorter than its width."""
    tokens, seen, mask = windows
    far = (seen.diff(dim=1) != 1).flip(1).cumsum(1).flip(1) > 1
    return tokens, seen, mask & ~torch.nn.functional.pad(far, (0, 1))


@pytest.mark.parametrize(
    ("part", "change", "rows"),
    [
        ("levels_of", passed_on, apart),
        ("levels_of", restarted, list),
        ("windows_of", run_on, apart),
        ("windows_of", cut_off, list),
    ],
    ids=["state passed on", "state dropped", "convolution runs on", "convolution cut off"],
)
def test_rows_leak_if_a_reset_is_removed(part, change, rows, model, tiny, tmp_path, monkeypatch):
    """Shows that the test above would fail."""
    real = getattr(packed_delta, part)
    monkeypatch.setattr(packed_delta, part, lambda *arguments: change(real(*arguments)))
    (ours, _), (alone, _) = outcomes(tiny, model, rows(bushy(tiny)), tmp_path)
    assert (ours - alone).abs().max() > 1e-3


def test_ranks_cannot_share_a_state(tiny):
    ranks = Ranks(size=2, context=ContextParallel(0, 2, None))
    with refused("state_not_shared", "machine.trainer.context_parallel = 2"):
        Learner(tiny.model(), trainer_settings(packing=True), temperature=1.0, ranks=ranks)


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 5e-3), (torch.bfloat16, 2e-2)])
def test_gpu_kernels_equal_the_plain_rule(dtype, tolerance):
    """fla-core's outputs, final states and gradients, relative to those of fp32 in plain torch."""
    if not has_fla():
        pytest.skip("needs fla-core")
    lengths, random = (65, 1, 130, 2, 64), torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random)

    T, S = sum(lengths), len(lengths)
    inputs = [draw(T, 2, 128), draw(T, 2, 128), draw(T, 4, 128), -draw(T, 4).abs() / 8, draw(T, 4).sigmoid()]
    inputs.append(draw(S, 4, 128, 128) / 8)
    weights = [draw(T, 4, 128).cuda(), draw(S, 4, 128, 128).cuda()]
    results_of = []
    for rule, kind in ((delta_rule, dtype), (torch_rule, torch.float32)):
        kinds = [kind, kind, kind, torch.float32, kind, torch.float32]
        leaves = [one.to("cuda", dtype).to(to).requires_grad_() for one, to in zip(inputs, kinds, strict=True)]
        out, ends = rule(*leaves[:5], lengths, leaves[5])
        (out * weights[0]).sum().add((ends * weights[1]).sum()).backward()
        results_of.append([out, ends, *(one.grad for one in leaves)])
    for ours, plain in zip(*results_of, strict=True):
        assert (ours.float() - plain.float()).norm() < tolerance * plain.float().norm()
