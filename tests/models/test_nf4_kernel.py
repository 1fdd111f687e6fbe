"""Dequantization of 4-bit weights: the kernel equals plain torch bit for bit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from armature.components.models.blockwise import NF4


def both(shape: tuple[int, int], dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor]:
    """Dequantize the same weights with the kernel and in plain torch. The weights have all codes, and one block has
    scale 0."""
    from armature.components.models.kernels import dequantize

    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0)).flatten()
    weight[: NF4.block] = 0
    indices, scales = (tensor.to(device) for tensor in NF4.quantize(weight))
    pairs = indices.view(-1, 2)
    packed = (pairs[:, 0] << 4) | pairs[:, 1]
    return dequantize(packed, scales, dtype), NF4.dequantize(indices, scales, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 2), (37, 258), (2048, 11008)])
def test_dequantize_kernel_on_gpu_equals_plain_torch(shape, dtype):
    kernel, plain = both(shape, dtype, "cuda")
    assert kernel.dtype == plain.dtype == dtype and torch.equal(kernel, plain)
