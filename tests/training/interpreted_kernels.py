"""The optimizer's Triton kernels on a CPU; `test_interpreted` runs this file with TRITON_INTERPRET=1.

The tests use fp16, because the interpreter truncates to bf16 where a GPU rounds to the nearest value.
"""

from __future__ import annotations

import pytest
import torch

from armature.components.models.blockwise import SIGNED, UNSIGNED, Codes
from armature.components.training.kernels import BLOCK, CHUNK, add, dequantize, quantize, update
from armature.components.training.optimizer import joined, split

from .test_moments import parameters, train
from .update_cases import both_after


@pytest.mark.parametrize("shape", [(1, 1), (37, 55), (1, 4096), (0, 3)])
def test_kernel_matches_plain_update(shape: tuple[int, int]) -> None:
    kernel, plain = both_after(6, shape, torch.float16, "cpu")
    for ours, theirs in zip(kernel[:3], plain[:3], strict=True):
        last_bit = theirs.float().abs() * 2**-10 + 2**-24
        assert ((ours.float() - theirs.float()).abs() <= last_bit).all()
        assert (ours == theirs).float().sum() >= 0.99 * ours.numel()
    exact = [state[0].float() + state[3].float() for state in (kernel, plain)]
    torch.testing.assert_close(*exact, rtol=0, atol=1e-6)


def test_kernel_updates_masters_like_fp32_weights() -> None:
    """Compilers may fuse a product and a sum differently, hence the tolerance. The halves still make one number."""
    random = torch.Generator().manual_seed(0)
    master = torch.randn(37, 55, generator=random)
    weight, low = split(master)
    first, second = torch.zeros_like(master), torch.zeros_like(master)
    reference = torch.nn.Parameter(joined(weight, low))
    stock = torch.optim.AdamW([reference], lr=1e-3, betas=(0.9, 0.95), eps=1e-6, weight_decay=0.1)
    for step in range(1, 7):
        reference.grad = torch.randn(master.shape, generator=random)
        tensors = [weight], [reference.grad], [first], [second], [low]
        update(*tensors, rate=1e-3, decay=0.1, betas=(0.9, 0.95), eps=1e-6, step=step, clip=0.25)
        reference.grad *= 0.25
        stock.step()
    torch.testing.assert_close(joined(weight, low), reference.detach(), rtol=1e-6, atol=1e-9)
    assert all(torch.equal(a, b) for a, b in zip(split(joined(weight, low)), (weight, low), strict=True))


def test_kernel_update_of_many_parameters_equals_one_by_one() -> None:
    """Sizes are around a block's and a program's, and one tensor does not start at a multiple of 16 bytes."""
    random = torch.Generator().manual_seed(0)
    alone = []
    for shape in ((3,), (37, 55), (0,), (BLOCK,), (CHUNK,), (CHUNK + BLOCK + 1,), (2 * CHUNK - 1,), (1,)):
        weight, low = split(torch.randn(shape, generator=random))
        gradient = torch.randn(shape[::-1], generator=random).T if len(shape) > 1 else torch.randn(shape)
        alone.append([weight, gradient, torch.randn(shape, generator=random), torch.rand(shape), low])
    together = [[tensor.clone() for tensor in tensors] for tensors in alone]
    together[0] = [torch.cat([tensor, tensor])[3:] for tensor in alone[0]]
    numbers = {"rate": 1e-2, "decay": 0.1, "betas": (0.9, 0.95), "eps": 1e-6, "step": 3, "clip": 0.25}
    for tensors in alone:
        update(*([tensor] for tensor in tensors), **numbers)
    update(*zip(*together, strict=True), **numbers)
    for ours, theirs in zip(together, alone, strict=True):
        assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("shape", [(1, 1), (37, 55), (0, 3)])
def test_kernel_adds_gradient_like_torch(shape: tuple[int, int]) -> None:
    random = torch.Generator().manual_seed(0)
    total = torch.full(shape, torch.nan)
    gradients = [torch.randn(shape[::-1], generator=random).half().T for _ in range(3)]
    expected = torch.zeros(shape)
    for number, gradient in enumerate(gradients):
        add(total, gradient, number > 0)
        expected += gradient
    assert torch.equal(total, expected)


@pytest.mark.parametrize("shape", [(1,), (255,), (16, 16), (257,), (65, 300)])
@pytest.mark.parametrize("codes", [SIGNED, UNSIGNED], ids=["signed", "unsigned"])
def test_eight_bit_kernels_equal_plain_codes(codes: Codes, shape: tuple[int, ...]) -> None:
    """Sizes are around a block's and a program's. The numbers cover all codes, halfway points between two, and a block
    of zeros."""
    random = torch.Generator().manual_seed(0)
    numbers = torch.randn(shape, generator=random) * torch.rand(shape, generator=random) ** 20
    numbers = numbers.abs() if codes is UNSIGNED else numbers
    flat, values = numbers.view(-1), torch.tensor(codes.values)
    if len(flat) > 4 * codes.block:
        flat[: codes.block] = 0
        flat[codes.block : 2 * codes.block] = values
        flat[2 * codes.block : 3 * codes.block - 1] = (values[1:] + values[:-1]) / 2
        flat[3 * codes.block - 1] = 1
    indices, scales = torch.empty(shape, dtype=torch.uint8), torch.empty(codes.blocks(len(flat)))
    quantize(numbers, codes, indices, scales)
    nearest, largest = codes.quantize(numbers)
    assert torch.equal(indices, nearest) and torch.equal(scales, largest)
    assert torch.equal(dequantize(indices, scales, codes), codes.dequantize(nearest, largest))
    quantize(numbers, codes, indices, scales, least=1)
    assert torch.equal(indices, nearest.masked_fill((nearest == 0) & (numbers > 0), 1))


def test_kernel_update_with_eight_bit_moments_equals_its_parts() -> None:
    """The parts are: dequantize, update with fp32 moments, quantize."""
    random, fused = torch.Generator().manual_seed(0), list[list[torch.Tensor]]()
    for shape in ((37, 55), (BLOCK,), (CHUNK + BLOCK + 257,)):
        moments = torch.randn(shape, generator=random), torch.rand(shape, generator=random) ** 20
        weight, low = split(torch.randn(shape, generator=random))
        stored = [
            each for codes, moment in zip((SIGNED, UNSIGNED), moments, strict=True) for each in codes.quantize(moment)
        ]
        fused.append([weight, torch.randn(shape, generator=random), *stored, low])
    apart = [[tensor.clone() for tensor in tensors] for tensors in fused]
    for step in (3, 4):
        numbers = {"rate": 1e-2, "decay": 0.1, "betas": (0.9, 0.95), "eps": 1e-6, "step": step, "clip": 0.25}
        weights, gradients, firsts, scales1, seconds, scales2, lows = zip(*fused, strict=True)
        update(weights, gradients, firsts, seconds, lows, **numbers, scales=(scales1, scales2))
        for weight, gradient, first, scale1, second, scale2, low in apart:
            m, v = dequantize(first, scale1, SIGNED), dequantize(second, scale2, UNSIGNED)
            update([weight], [gradient], [m], [v], [low], **numbers)
            quantize(m, SIGNED, first, scale1)
            quantize(v, UNSIGNED, second, scale2, least=1)
    for ours, theirs in zip(fused, apart, strict=True):
        assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))


def test_optimizer_with_eight_bit_kernel_matches_plain_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    """A product and a sum may be rounded at once, after which a moment between two codes may get the other one."""
    plain, kernel = parameters(torch.bfloat16), parameters(torch.bfloat16)
    theirs = train(plain, "8bit", range(4))
    for module in ("optimizer", "optimizer_state"):
        monkeypatch.setattr(f"armature.components.training.{module}.on_gpu", lambda _: True)
    ours = train(kernel, "8bit", range(4))
    for one, other in zip(kernel, plain, strict=True):
        assert (one == other).float().mean() > 0.98
        for name, value in ours.state[one].items():
            if value.dtype == torch.uint8:
                assert (value == theirs.state[other][name]).float().mean() > 0.99
            elif value.dtype == torch.float32:
                torch.testing.assert_close(value, theirs.state[other][name], rtol=1e-5, atol=1e-7)
