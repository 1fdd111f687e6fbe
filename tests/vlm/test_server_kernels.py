"""Gradients of the replacement kernels in benchmarks/bitwise_kernels.py compared with PyTorch's."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear, silu

from benchmarks import bitwise_kernels
from benchmarks.bitwise_kernels import Attention, LogProbs, Matmul, Norm, Rotary, Silu, plain_kernels

ENDS, HEADS, GROUPS, SIZE = (0, 4, 9), 4, 2, 8
IDS = torch.tensor([1, 3, 0])
ANGLES = torch.linspace(0, 5, 9 * SIZE // 2).view(9, SIZE // 2)


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * weight


def turned(*rows: Tensor) -> tuple[Tensor, ...]:
    cos, sin = ANGLES.cos()[:, None], ANGLES.sin()[:, None]
    halves = [x.chunk(2, -1) for x in rows]
    return tuple(torch.cat([one * cos - two * sin, two * cos + one * sin], -1) for one, two in halves)


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    outs = []
    for begin, end in pairwise(ENDS):
        wide = (q, *(x.repeat_interleave(HEADS // GROUPS, 1) for x in (k, v)))
        query, key, value = (x[begin:end].transpose(0, 1) for x in wide)
        mask = torch.full((end - begin, end - begin), float("-inf")).triu(1)
        outs.append(((0.3 * query @ key.transpose(1, 2) + mask).softmax(-1) @ value).transpose(0, 1))
    return torch.cat(outs)


def replaced_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return Attention.apply(q, k, v, torch.tensor(ENDS, dtype=torch.int32), 5, 0.3, True)


@pytest.mark.parametrize(
    ("replaced", "plain", "shapes"),
    [
        pytest.param(Matmul.apply, linear, [(2, 5, 8), (7, 8), (7,)], id="matmul"),
        pytest.param(lambda x, weight: Norm.apply(x, weight, 1e-6), norm, [(2, 5, 8), (8,)], id="norm"),
        pytest.param(Silu.apply, lambda gate, up: silu(gate) * up, [(5, 8), (5, 8)], id="silu"),
        pytest.param(
            lambda q, k: Rotary.apply(q, k, ANGLES.cos(), ANGLES.sin()),
            turned,
            [(9, HEADS, SIZE), (9, GROUPS, SIZE)],
            id="rotary",
        ),
        pytest.param(
            replaced_attention, attention, [(9, HEADS, SIZE), (9, GROUPS, SIZE), (9, GROUPS, SIZE)], id="attention"
        ),
        pytest.param(
            lambda logits: LogProbs.apply(logits, IDS),
            lambda logits: logits.log_softmax(-1).gather(-1, IDS[:, None])[:, 0],
            [(3, 11)],
            id="logprobs",
        ),
    ],
)
def test_replacement_kernels_have_gradients_of_pytorch(monkeypatch, replaced, plain, shapes):
    monkeypatch.setattr(bitwise_kernels, "kernels", plain_kernels)
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(shape, generator=generator, requires_grad=True) for shape in shapes]
    outs = [out if isinstance(out, tuple) else (out,) for out in (replaced(*inputs), plain(*inputs))]
    grads = [torch.randn(out.shape, generator=generator) for out in outs[1]]
    gradients, expected = (torch.autograd.grad(out, inputs, grads) for out in outs)
    for mine, theirs in [*zip(outs[0], outs[1], strict=True), *zip(gradients, expected, strict=True)]:
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)
