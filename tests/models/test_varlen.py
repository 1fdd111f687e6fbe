"""Attention within windows, compared with softmax attention in plain torch and with transformers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor, nn
from transformers import AutoProcessor

from armature.components.models.load import load_model
from armature.components.models.settings import ModelSettings
from armature.components.models.varlen import attend_in_windows

from .reference import softmax_attention

WINDOWED = ("qwen2-vl", "qwen2.5-vl", "qwen3-vl")
DEVICES = (
    pytest.param("cpu", torch.float32, 1e-6, id="cpu"),
    pytest.param("cuda", torch.float32, 1e-5, marks=pytest.mark.gpu, id="cuda-fp32"),
    pytest.param("cuda", torch.bfloat16, 2e-2, marks=pytest.mark.gpu, id="cuda-bf16"),
)


def compare(
    attend: Callable[..., Any], expected: Callable[..., Tensor], shapes: Any, device: Any, tolerance: float
) -> None:
    """Compare `attend` with `expected`: their outputs and gradients. `attend` takes (1, H, T, D) tensors, and
    `expected` takes (T, H, D) tensors."""
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.randn(shape, generator=generator).to(*device).requires_grad_() for shape in shapes]
    out, nothing = attend(*(one.transpose(0, 1)[None] for one in drawn))
    assert nothing is None
    weight = torch.randn(out[0].shape, generator=generator).to(*device)
    ours = (out[0], *torch.autograd.grad((out[0] * weight).sum(), drawn))
    reference = expected(*drawn)
    theirs = (reference, *torch.autograd.grad((reference * weight.double()).sum(), drawn))
    for one, other in zip(ours, theirs, strict=True):
        assert (one.double() - other.double()).norm() <= tolerance * other.double().norm()


@pytest.mark.parametrize(("device", "dtype", "tolerance"), DEVICES)
def test_windows_attend_only_within_themselves(device, dtype, tolerance):
    lengths = (4, 4, 2, 4)
    ends = torch.tensor([0, 4, 8, 10, 14], dtype=torch.int32, device=device)

    def attend(*tensors: Tensor) -> Any:
        return attend_in_windows(
            nn.Identity(), *tensors, None, cu_seq_lens_q=ends, max_length_q=4, scaling=tensors[0].shape[-1] ** -0.5
        )

    same_window = torch.block_diag(*(torch.ones(length, length) for length in lengths)).bool().to(device)
    compare(
        attend, lambda *tensors: softmax_attention(*tensors, same_window), [(14, 2, 80)] * 3, (device, dtype), tolerance
    )


@pytest.mark.parametrize("family", WINDOWED)
def test_vision_tower_calls_attention_once_per_layer_with_equal_results(family, checkpoint, monkeypatch):
    """transformers' `sdpa` calls attention once per image or window; each of these images has several windows."""
    folder = checkpoint(family)
    processor = AutoProcessor.from_pretrained(folder)
    images = [Image.effect_noise(size, 64.0).convert("RGB") for size in ((224, 168), (112, 150))]
    inputs = dict(processor(images=[images], text=[2 * f"a {processor.image_token}"], return_tensors="pt"))
    results, calls = {}, dict.fromkeys(("auto", "sdpa"), 0)
    real = nn.functional.scaled_dot_product_attention
    for name in calls:

        def counted(*args: Any, _name: str = name, **more: Any) -> Tensor:
            calls[_name] += 1
            return real(*args, **more)

        for module in ("torch.nn.functional", "armature.components.models.varlen"):
            monkeypatch.setattr(f"{module}.scaled_dot_product_attention", counted)
        model = load_model(folder, ModelSettings(source="/given", dtype="float32", attn_implementation=name))
        logits = model(**inputs).logits
        logits.square().mean().backward()
        results[name] = logits.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    assert calls["auto"] < calls["sdpa"]
    torch.testing.assert_close(results["auto"][0], results["sdpa"][0], atol=1e-6, rtol=1e-6)
    assert any("visual" in name for name in results["auto"][1])
    torch.testing.assert_close(results["auto"][1], results["sdpa"][1], atol=1e-6, rtol=1e-6)
