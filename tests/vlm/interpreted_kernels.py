"""The output head's Triton kernels on a CPU; `test_interpreted` runs this file with TRITON_INTERPRET=1."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings

from armature.components.vlm.heads import fused
from armature.components.vlm.heads.backends import HEADS, HeadSettings
from tests.refusals import refused

from .logprob_cases import CASES, CPU, ODD, Case, check_unused, compare


@settings(max_examples=4, deadline=None)  # the conftest with this setting is not loaded here
@given(case=CASES)
def test_heads_of_any_size_equal_float64(case: Case) -> None:
    compare("triton", case, torch.float32, values=3e-5, gradients=3e-5)


@pytest.mark.parametrize("chunk_tokens", [4, 70])
@pytest.mark.parametrize("case", ODD)
def test_heads_of_odd_sizes_equal_float64(case: Case, chunk_tokens: int) -> None:
    compare("triton", replace(case, chunk_tokens=chunk_tokens), torch.float32, values=3e-5, gradients=3e-5)


def test_tensor_descriptors_equal_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "FULL", replace(fused.FULL, descriptors=True))
    compare("triton", Case(70, 301, 48, 0.7, 30.0, True, 16), torch.float32, values=3e-5, gradients=3e-5)


def test_softcap_with_unlikely_tokens() -> None:
    """For logits far below the largest, exp(z - m) is 0 in fp32, but the softcap still has a slope."""
    compare("triton", Case(9, 130, 12, 0.05, 30.0, chunk_tokens=9), torch.float32, values=3e-4, gradients=3e-5)


@pytest.mark.parametrize("chunk_tokens", [2, 9])
def test_unused_result_does_not_change_gradient(chunk_tokens: int) -> None:
    check_unused("triton", chunk_tokens)


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_kept_gradient_is_used_once_and_forbidden_block_is_handled(softcap: float | None) -> None:
    """Compare gradients of a first backward pass, of a second through the same graph, and without kept values."""
    head, hidden, targets, forbidden = Case(9, 3 * fused.FULL.columns, 12).make(CPU, torch.float32)
    forbidden[: fused.FULL.columns] = True
    gradients = []
    for chunk_tokens, passes in ((9, 2), (8, 1)):
        made = HEADS["triton"](HeadSettings(0.7, softcap, chunk_tokens), head, CPU)
        logprobs, entropy = made(head, hidden, targets, forbidden)
        total = logprobs.masked_fill(logprobs.isinf(), 0.0).square().sum() + entropy.square().sum()
        gradients += [torch.autograd.grad(total, head.weight, retain_graph=True)[0] for _ in range(passes)]
    first, second, again = gradients
    assert torch.equal(second, again)
    assert not torch.equal(first, again)
    assert (first - again).norm() < 3e-5 * again.norm()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_rejects_unsupported_dtype(dtype: torch.dtype) -> None:
    head, hidden, targets, forbidden = Case(3, 20, 8).make(CPU, dtype)
    with refused("triton_dtype_unsupported", "float32"):
        HEADS["triton"](HeadSettings(1.0, None, 4), head, CPU)(head, hidden, targets, forbidden)
