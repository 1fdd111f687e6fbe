"""Float8 products, compared with rounding by hand and with products in float64."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from armature.components.models.blockwise import FP8Linear, quantize_layers, quantize_rows
from tests.refusals import refused


def by_hand(value: float) -> float:
    """Return the float8_e4m3fn number that is nearest to `value`. Such a number has 3 bits after the leading one and an
    exponent from -6 to 8. Ties are rounded to even."""
    if not value:
        return 0.0
    unit = 2.0 ** (max(math.floor(math.log2(abs(value))), -6) - 3)
    return round(value / unit) * unit


def exact(rows: Tensor) -> Tensor:
    """Round each row to float8 with a scale of its own, computed by hand. Return the rounded rows in float64."""
    values = []
    for row in rows.double():
        scale = float(row.abs().max().float() / 448.0)
        values.append([by_hand(float(torch.tensor(float(v)) / torch.tensor(scale))) * scale for v in row])
    return torch.tensor(values, dtype=torch.float64)


def layer(bias: bool = True) -> nn.Linear:
    torch.manual_seed(0)
    made = nn.Linear(48, 32, bias=bias)
    with torch.no_grad():
        made.weight.mul_(torch.logspace(-3, 2, 32)[:, None])
    return made.to(torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fp8_rounding_equals_hand_computed_values(dtype):
    rows = torch.randn(7, 33).to(dtype) * torch.logspace(-20, 20, 7)[:, None].to(dtype)
    rows[:, ::5] *= 1e-4  # subnormal codes
    codes, scales = quantize_rows(rows)
    torch.testing.assert_close(codes.double() * scales.double(), exact(rows), rtol=1e-6, atol=0)


def test_quantized_row_of_zeros_stays_zero():
    codes, scales = quantize_rows(torch.zeros(2, 5))
    assert not codes.float().any() and scales.isfinite().all() and (scales > 0).all()


@pytest.mark.parametrize("bias", [True, False])
def test_fp8_product_equals_float64_product_of_rounded_factors(bias):
    plain = layer(bias)
    x = torch.randn(3, 5, 48).bfloat16()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        product = FP8Linear(plain)(x)
    sides = exact(x.flatten(0, 1)) @ exact(plain.weight.detach()).t()
    expected = sides if plain.bias is None else sides + plain.bias.double()
    assert product.dtype == torch.bfloat16
    torch.testing.assert_close(product.double(), expected.view(3, 5, 32), rtol=2**-8, atol=1e-6)
    difference = (product.double() - plain(x).double()).norm() / plain(x).double().norm()
    assert 0.005 < float(difference) < 0.05


def test_fp8_layer_shares_the_weight_and_updates_codes_in_place():
    root = nn.Sequential(layer(), nn.GELU(), nn.Sequential(layer(False)))
    before, names = {k: v.clone() for k, v in root.state_dict().items()}, [n for n, _ in root.named_parameters()]
    quantize_layers(root, "here")
    assert root.state_dict().keys() == before.keys() and [n for n, _ in root.named_parameters()] == names
    assert all(torch.equal(value, before[name]) for name, value in root.state_dict().items())
    quantized, address = root[0], root[0].codes.data_ptr()
    assert isinstance(quantized, FP8Linear)
    with torch.no_grad():
        quantized.weight.neg_()
    quantized.quantize()
    torch.testing.assert_close(quantized.codes.float(), -quantize_rows(before["0.weight"])[0].float())
    assert quantized.codes.data_ptr() == address


def test_rejects_fp8_layers_with_fp32_weights():
    with refused("fp8_dtype_mismatch", "float32", "policy.quantization"):
        quantize_layers(nn.Sequential(nn.Linear(4, 4)), "policy.quantization")


def test_fp8_layer_rejects_gradients():
    with pytest.raises(RuntimeError):
        FP8Linear(layer())(torch.randn(2, 48, requires_grad=True))


@pytest.mark.parametrize(
    ("capability", "size", "code", "value"),
    [((8, 9), 32, "fp8_unsupported", "A100"), ((9, 0), 24, "fp8_size_unsupported", "24 x 32")],
)
def test_rejects_fp8_on_unsupported_gpus_and_sizes(capability, size, code, value, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "A100")
    with refused(code, value):
        quantize_layers(nn.Sequential(nn.Linear(32, size).to(torch.bfloat16)), "rollouts.quantization")


@pytest.mark.gpu
@pytest.mark.parametrize("bias", [True, False])
def test_fp8_product_on_gpu_equals_cpu(bias):
    plain, x = layer(bias), torch.randn(3, 5, 48).bfloat16()
    with torch.no_grad():
        expected = FP8Linear(plain)(x)
        actual = FP8Linear(plain.to("cuda"))(x.to("cuda")).cpu()
    differences = (actual.double() - expected.double()).flatten(0, 1).norm(dim=0)
    assert (differences <= 1e-2 * expected.double().flatten(0, 1).norm(dim=0)).all()  # GPU sums have some 14 bits
