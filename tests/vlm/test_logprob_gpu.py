"""The log-prob backends on a GPU, in fp32 and bf16, against float64."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import pytest
import torch

from armature.components.vlm.heads import fused
from armature.components.vlm.settings import Logprobs

from .logprob_cases import GPU, Case, compare

BACKENDS = get_args(Logprobs)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("softcap", [None, 30.0])
@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.3])
def test_on_a_gpu_equals_float64(backend, temperature, softcap):
    """Sums are fp32; gradients of logits are rounded to bf16 once, or twice where `triton` keeps what they are made of.
    `normal` rounds its logits to bf16 as well.
    """
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
def test_on_a_gpu_both_tiles_equal_float64(monkeypatch):
    case = Case(1000, 5000, 520, 0.7, None, True, 100)
    for tile in (fused.LARGE, fused.SMALL, replace(fused.SMALL, descriptors=True)):
        monkeypatch.setattr(fused, "LARGE", tile)
        monkeypatch.setattr(fused, "SMALL", tile)
        for chunk in (100, 1000):
            kept = replace(case, chunk_tokens=chunk)
            compare("triton", kept, torch.bfloat16, values=5e-5, gradients=5e-3, device=GPU)
