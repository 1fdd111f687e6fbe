"""Log-prob backends compared with log-softmax and entropy written out in float64, values and gradients."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from torch import nn

from armature.components.models.adapters import model_inputs
from armature.components.models.settings import LoraSettings
from armature.components.vlm.heads import fused
from armature.components.vlm.heads.backends import HEADS, HeadSettings
from armature.components.vlm.logprobs import Policy, predicting
from armature.components.vlm.settings import Logprobs
from tests.refusals import refused

from .logprob_cases import CASES, CPU, GPU, ODD, Case, check_unused, compare


@pytest.mark.parametrize("backend", ["normal", "torch"])
@settings(max_examples=60)
@given(case=CASES)
def test_heads_of_any_size_equal_float64(backend, case):
    compare(backend, case, torch.float64, values=1e-11, gradients=1e-11)
    compare(backend, case, torch.float32, values=3e-5, gradients=3e-5)


@pytest.mark.parametrize("backend", ["normal", "torch"])
@pytest.mark.parametrize("case", ODD, ids=["no-token", "one-token", "odd-sizes"])
def test_heads_of_odd_sizes_equal_float64(backend, case):
    compare(backend, case, torch.float32, values=3e-5, gradients=3e-5)


@pytest.mark.parametrize("backend", ["normal", "torch"])
def test_unused_result_does_not_change_gradient(backend):
    check_unused(backend)


def test_all_backend_names_import():
    assert set(get_args(Logprobs)) == set(HEADS)
    for name in HEADS:
        assert callable(HEADS[name]), name


def test_autocast_computes_in_bf16_with_fp32_gradients():
    head, hidden, targets, forbidden = Case(40, 200, 64).make(CPU, torch.float32)
    results = []
    for autocast in (False, True):
        head.zero_grad()
        made = HEADS["torch"](HeadSettings(1.0, None, 8), head, CPU)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            logprobs, entropy = made(head, hidden, targets, forbidden)
        assert logprobs.dtype == entropy.dtype == torch.float32
        logprobs.masked_fill(logprobs.isinf(), 0.0).sum().backward()
        assert head.weight.grad.dtype == torch.float32
        results.append((logprobs.detach(), head.weight.grad.clone()))
    (exact, gradient), (ours, ours_gradient) = results
    assert 1e-4 < (ours - exact)[exact.isfinite()].abs().max() < 0.1
    assert (ours_gradient - gradient).norm() < 2e-2 * gradient.norm()


def test_head_adapters_are_applied_and_can_be_disabled(tiny):
    lora = LoraSettings(rank=4, alpha=8, targets=("q_proj", "lm_head"), scope="all")
    model = tiny.model(lora=lora).double()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
    batch = tiny.collator.collate(tiny.samples(2, seed=0, n_images=(0,)), tiny.images.open)
    policies = [Policy(model, logprobs=name, temperature=1.0, chunk_tokens=3) for name in ("normal", "torch")]
    results = []
    for policy in policies:
        model.zero_grad()
        logprobs, _ = policy(model_inputs(batch), predicting(batch.loss_mask))
        logprobs.sum().backward()
        with torch.no_grad(), model.disable_adapter():
            without, _ = policy(model_inputs(batch), predicting(batch.loss_mask))
        assert (without - logprobs).abs().max() > 1e-2
        results.append((logprobs, without, {n: p.grad for n, p in model.named_parameters() if p.grad is not None}))
    assert any("lm_head" in name for name in results[0][2])
    torch.testing.assert_close(results[0], results[1], atol=1e-10, rtol=1e-8)


def test_backends_reject_unsupported_heads_and_devices(monkeypatch):
    plain, linear = HeadSettings(1.0, None, 4), nn.Linear(4, 8)
    for backend in ("torch", "triton"):
        with refused("head_not_supported", "Identity", "'normal'"):
            HEADS[backend](plain, nn.Identity(), CPU)
    with refused("unknown_name", "'trition'", "'triton'"):
        HEADS["trition"]
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(fused, "TRITON", True)
    with refused("triton_needs_cuda", "cpu", "'torch'"):
        HEADS["triton"](plain, linear, CPU)
    monkeypatch.setattr(fused, "TRITON", False)
    with refused("triton_missing", "trainer.logprobs"):
        HEADS["triton"](plain, linear, GPU)


BACKENDS = get_args(Logprobs)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("softcap", [None, 30.0])
@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.3])
def test_gpu_backends_equal_float64(backend, temperature, softcap):
    """Sums are fp32. Gradients of logits are rounded to bf16 once, or twice if `triton` keeps values for them; `normal`
    rounds its logits to bf16 as well."""
    for case in (
        Case(300, 5003, 96, temperature, softcap, True, 64),
        Case(257, 1999, 37, temperature, softcap, False, 50),
        Case(1000, 4096, 512, temperature, softcap, False, 100),
        Case(300, 5003, 96, temperature, softcap, True, 300),
        Case(0, 640, 64, temperature, softcap, True, 50),
    ):
        compare(backend, case, torch.float32, values=5e-5, gradients=5e-5, device=GPU)
        rounded = backend == "normal"
        compare(
            backend,
            case,
            torch.bfloat16,
            values=0.15 if rounded else 5e-5,
            gradients=3e-2 if rounded else 5e-3,
            device=GPU,
        )


@pytest.mark.gpu
def test_gpu_tilings_equal_float64(monkeypatch):
    case = Case(1000, 5000, 520, 0.7, None, True, 100)
    for tile in (fused.LARGE, fused.SMALL, replace(fused.SMALL, descriptors=True)):
        monkeypatch.setattr(fused, "LARGE", tile)
        monkeypatch.setattr(fused, "SMALL", tile)
        for chunk in (100, 1000):
            chunked = replace(case, chunk_tokens=chunk)
            compare("triton", chunked, torch.bfloat16, values=5e-5, gradients=5e-3, device=GPU)
