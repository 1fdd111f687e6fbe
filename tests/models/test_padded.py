"""MLPs whose products are padded to a wider width than their weights."""

from __future__ import annotations

from contextlib import nullcontext
from copy import deepcopy

import pytest
import torch
from torch import Tensor, nn
from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLVisionConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLMLP

from armature.components.models.compiled import pad_widths


def mlps(width: int, bias: bool = True) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    config = Qwen2_5_VLVisionConfig(hidden_size=32, intermediate_size=width, hidden_act="silu")
    plain = Qwen2_5_VLMLP(config, bias=bias)
    padded = deepcopy(plain)
    pad_widths(padded)
    return plain, padded


def widths(module: nn.Module, x: Tensor) -> tuple[int, int]:
    """Run an MLP and return two widths of its second matrix product: the width of the input and the width of the
    weight."""
    seen = []
    module.down_proj.register_forward_pre_hook(lambda _, args: seen.append(args[0].shape[-1]))
    module(x)
    return seen[0], module.down_proj.weight.shape[1]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("autocast", [False, True])
def test_padded_mlp_equals_the_plain_mlp(bias, autocast):
    plain, padded = mlps(100, bias)
    assert widths(padded, torch.zeros(1, 32)) == (128, 100)
    x, results = torch.randn(17, 32), []
    for module in (plain, padded):
        inputs = x.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext():
            out = module(inputs)
        out.float().square().sum().backward()
        gradients = {name: p.grad for name, p in module.named_parameters()}
        results.append({"out": out.detach(), "x": inputs.grad} | gradients)
    assert results[0].keys() == results[1].keys()
    for name, value in results[0].items():
        assert results[1][name].dtype == value.dtype
        close = {"rtol": 2e-2, "atol": 2e-2 * float(value.abs().max())} if autocast else {"rtol": 1e-6, "atol": 1e-6}
        torch.testing.assert_close(results[1][name], value, **close)


def test_padding_keeps_names_shapes_and_fp32_gradients():
    plain, padded = mlps(100)
    for p in padded.parameters():
        p.data = p.data.bfloat16()
        p.grad_dtype = torch.float32
    padded(torch.randn(3, 32).bfloat16()).sum().backward()
    assert {n: v.shape for n, v in padded.state_dict().items()} == {n: v.shape for n, v in plain.state_dict().items()}
    assert all(p.grad.dtype == torch.float32 and p.grad.shape == p.shape for p in padded.parameters())


@pytest.mark.parametrize("width", [64, 128, 104])
def test_aligned_widths_are_not_padded(width):
    _, same = mlps(width)
    assert widths(same, torch.zeros(1, 32)) == (width, width)


def test_other_linear_classes_are_not_padded():
    class Scaled(nn.Linear):
        pass

    plain, _ = mlps(100)
    plain.up_proj = Scaled(32, 100)
    pad_widths(plain)
    assert widths(plain, torch.zeros(1, 32)) == (100, 100)
