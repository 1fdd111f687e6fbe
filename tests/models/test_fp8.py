"""Products in 8 bits against numbers rounded by hand and products in float64."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from armature.components.models.blockwise import FP8Linear, quantize_layers, quantize_rows
from tests.refusals import refused


def by_hand(value: float) -> float:
    """The nearest number with 3 bits after the leading one, exponents from -6 to 8; ties to even."""
    if not value:
        return 0.0
    unit = 2.0 ** (max(math.floor(math.log2(abs(value))), -6) - 3)
    return round(value / unit) * unit


def exact(rows: Tensor) -> Tensor:
    """In float64, what the codes of each row stand for."""
    found = []
    for row in rows.double():
        scale = float(row.abs().max().float() / 448.0)
        found.append([by_hand(float(torch.tensor(float(v)) / torch.tensor(scale))) * scale for v in row])
    return torch.tensor(found, dtype=torch.float64)


def layer(bias: bool = True) -> nn.Linear:
    torch.manual_seed(0)
    made = nn.Linear(48, 32, bias=bias)
    with torch.no_grad():
        made.weight.mul_(torch.logspace(-3, 2, 32)[:, None])
    return made.to(torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_are_rounded_as_by_hand(dtype):
    rows = torch.randn(7, 33).to(dtype) * torch.logspace(-20, 20, 7)[:, None].to(dtype)
    rows[:, ::5] *= 1e-4  # subnormal codes
    codes, scales = quantize_rows(rows)
    torch.testing.assert_close(codes.double() * scales.double(), exact(rows), rtol=1e-6, atol=0)


def test_a_row_of_zeros_stays_zero():
    codes, scales = quantize_rows(torch.zeros(2, 5))
    assert not codes.float().any() and scales.isfinite().all() and (scales > 0).all()


@pytest.mark.parametrize("bias", [True, False])
def test_a_product_is_that_of_the_rounded_sides(bias):
    plain = layer(bias)
    x = torch.randn(3, 5, 48).bfloat16()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        found = FP8Linear(plain)(x)
    sides = exact(x.flatten(0, 1)) @ exact(plain.weight.detach()).t()
    expected = sides if plain.bias is None else sides + plain.bias.double()
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.double(), expected.view(3, 5, 32), rtol=2**-8, atol=1e-6)
    difference = (found.double() - plain(x).double()).norm() / plain(x).double().norm()
    assert 0.005 < float(difference) < 0.05


def test_the_weight_is_shared_and_codes_follow_it_in_place():
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


def test_weights_in_fp32_are_refused():
    with refused("fp8_dtype_mismatch", "float32", "policy.quantization"):
        quantize_layers(nn.Sequential(nn.Linear(4, 4)), "policy.quantization")


def test_there_is_no_gradient_to_be_wrong():
    with pytest.raises(RuntimeError):
        FP8Linear(layer())(torch.randn(2, 48, requires_grad=True))


@pytest.mark.parametrize(
    ("capability", "size", "code", "value"),
    [((8, 9), 32, "fp8_unsupported", "A100"), ((9, 0), 24, "fp8_size_unsupported", "24 x 32")],
)
def test_what_a_gpu_cannot_multiply_is_refused(capability, size, code, value, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "A100")
    with refused(code, value):
        quantize_layers(nn.Sequential(nn.Linear(32, size).to(torch.bfloat16)), "rollouts.quantization")


@pytest.mark.gpu
@pytest.mark.parametrize("bias", [True, False])
def test_a_gpu_multiplies_the_same_numbers(bias):
    plain, x = layer(bias), torch.randn(3, 5, 48).bfloat16()
    with torch.no_grad():
        expected = FP8Linear(plain)(x)
        found = FP8Linear(plain.to("cuda"))(x.to("cuda")).cpu()
    differences = (found.double() - expected.double()).flatten(0, 1).norm(dim=0)
    assert (differences <= 1e-2 * expected.double().flatten(0, 1).norm(dim=0)).all()  # its sums have some 14 bits
