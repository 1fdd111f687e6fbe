"""FlashAttention 4, compared with softmax attention in plain torch, on the GPUs that use it."""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch
from torch import Tensor

from armature.components.models import flash

from .reference import softmax_attention

QUERIES, KEYS, GROUPS = (300, 1, 129, 64), (300, 301, 459, 364), 2
"""Number of queries and number of keys of each sequence. The queries are the last tokens of their sequence."""

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _needs_kernel() -> None:
    q, k = (torch.empty(1, heads, 128, device="cuda", dtype=torch.bfloat16) for heads in (8, 1))
    if not flash.has_kernel(q, k):
        pytest.skip("needs a Hopper GPU and flash-attn-4")


def drawn(heads: int, width: int) -> list[Tensor]:
    generator = torch.Generator("cuda").manual_seed(0)
    shapes = [(sum(QUERIES), heads), (sum(KEYS), GROUPS), (sum(KEYS), GROUPS), (sum(QUERIES), heads)]
    return [
        torch.randn(*shape, width, generator=generator, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for shape in shapes
    ]


def attended(tensors: list[Tensor], window: int | None) -> tuple[Tensor, ...]:
    """Return the output of the attention, and the gradients of queries, keys and values."""
    q, k, v, weight = tensors
    queries, keys = (torch.tensor([0, *accumulate(each)], dtype=torch.int32, device="cuda") for each in (QUERIES, KEYS))
    out = flash.attend(q, k, v, (queries, keys), (max(QUERIES), max(KEYS)), q.shape[-1] ** -0.5, window)
    return out, *torch.autograd.grad(out, (q, k, v), weight)


def expected(tensors: list[Tensor], window: int | None) -> tuple[Tensor, ...]:
    """Compute the results of `attended` in plain torch, in float64."""
    q, k, v, weight = (each.detach().double().requires_grad_() for each in tensors)
    masks = []
    for queries, keys in zip(QUERIES, KEYS, strict=True):
        distance = torch.arange(keys - queries, keys)[:, None] - torch.arange(keys)
        masks.append(((distance >= 0) & (distance < (window or keys))).int())
    out = softmax_attention(q, k, v, torch.block_diag(*masks).bool().to(q.device))
    return out, *torch.autograd.grad(out, (q, k, v), weight.detach())


@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize(("width", "ratio"), sorted(flash.VERIFIED))
def test_flash_attention_4_equals_softmax_attention(width, ratio, window):
    tensors = drawn(GROUPS * ratio, width)
    for actual, reference in zip(attended(tensors, window), expected(tensors, window), strict=True):
        assert (actual.double() - reference).norm() <= 1e-2 * reference.norm()


def test_flash_attention_4_is_deterministic_on_request():
    tensors = drawn(16, 128)
    torch.use_deterministic_algorithms(True)
    try:
        first, second = attended(tensors, None), attended(tensors, None)
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))
