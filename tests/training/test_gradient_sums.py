"""Gradients of bf16 weights accumulated in fp32 by `GradientSums`, compared with autograd's own fp32 sums."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
from torch import Tensor, nn

from armature.components.training.gradient_sums import GradientSums, sum_in_fp32


class Tied(nn.Module):
    """A model with an embedding tied to its head, and two layers. One of them is used only if `late` is True."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.layer, self.late = nn.Embedding(11, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.bfloat16()

    def forward(self, ids: Tensor, late: bool) -> Tensor:
        hidden = self.layer(self.embedding(ids)).tanh()
        return self.head(self.late(hidden) if late else hidden)


def summed(model: Tied, sums: GradientSums | None, device: str = "cpu") -> dict[str, Tensor]:
    """Return the gradients by name, summed over three micro-batches. Only the last one uses the late layer."""
    random = torch.Generator().manual_seed(1)
    for late in (False, False, True):
        ids = torch.randint(11, (5, 7), generator=random).to(device)
        model(ids, late).float().log_softmax(-1).square().mean().backward()
        assert sums is None or all(parameter.grad is None for parameter in model.parameters())
    if sums is not None:
        sums.give()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def by_autograd(model: Tied) -> Tied:
    for parameter in model.parameters():
        parameter.grad_dtype = torch.float32
    return model


def plain_add(total: Tensor, gradient: Tensor, more: bool) -> None:
    total.copy_(total + gradient if more else gradient)


def assert_the_same(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert ours.keys() == theirs.keys() and "late.weight" in ours
    for name, value in theirs.items():
        assert ours[name].dtype == value.dtype == torch.float32
        assert torch.equal(ours[name], value), name


def test_sums_equal_autograd_bit_for_bit() -> None:
    expected = summed(by_autograd(Tied()), None)
    model, plain = Tied(), Tied()
    fast = [*model.layer.parameters(), *model.late.parameters()]
    assert_the_same(summed(model, GradientSums([*model.parameters()], fast, plain_add)), expected)
    assert_the_same(summed(plain, sum_in_fp32(plain)), expected)


def test_discarded_sums_do_not_become_gradients() -> None:
    model = Tied()
    sums = GradientSums([*model.parameters()], [*model.layer.parameters()], plain_add)
    ids = torch.zeros(1, 3, dtype=torch.long)
    model(ids, False).sum().backward()
    sums.discard()
    sums.give()
    assert model.layer.weight.grad is None and model.layer.bias.grad is None
    model(ids, False).sum().backward()
    sums.give()
    assert model.layer.weight.grad is not None and model.layer.bias.grad is not None


def test_added_callback_sees_each_gradient_once() -> None:
    model, calls = Tied(), list[tuple[nn.Parameter, float]]()
    fast = [*model.layer.parameters()]
    sums = GradientSums([*model.parameters()], fast, plain_add)
    sums.added = lambda parameter: calls.append((parameter, float(sums.totals[parameter].sum())))
    for _ in range(2):
        calls.clear()
        model(torch.zeros(1, 3, dtype=torch.long), False).sum().backward()
    assert {parameter for parameter, _ in calls} == {model.embedding.weight, *fast} and len(calls) == 3
    sums.give()
    assert all(parameter.grad is not None and float(parameter.grad.sum()) == total for parameter, total in calls)


def test_layer_compiles_without_graph_break_between_micro_batches() -> None:
    """torch.compile would break the graph at a bf16 weight that has an fp32 gradient."""
    model = Tied()
    sums = sum_in_fp32(model)
    x = torch.ones(1, 8, dtype=torch.bfloat16)
    model.layer(x).sum().backward()
    compiled = torch.compile(model.layer, fullgraph=True, backend="eager")
    compiled(x).sum().backward()
    sums.give()
    gradient = model.layer.bias.grad
    assert gradient is not None and torch.equal(gradient, torch.full((8,), 2.0))


@pytest.mark.gpu
def test_gpu_kernel_sums_equal_autograd() -> None:
    model = Tied().cuda()
    other = by_autograd(deepcopy(model))
    assert_the_same(summed(model, sum_in_fp32(model), "cuda"), summed(other, None, "cuda"))
    assert model.embedding.weight.grad_dtype == torch.float32
