"""The dequantization kernel on a CPU; `test_interpreted` runs this file with TRITON_INTERPRET=1.

Only fp32 and fp16 are tested: the interpreter truncates to bf16, while a GPU rounds to the nearest.
"""

from __future__ import annotations

import pytest
import torch

from .test_nf4_kernel import both


@pytest.mark.parametrize("shape", [(1, 2), (3, 50), (64, 64), (37, 258)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_dequantize_kernel_equals_plain_torch(shape: tuple[int, int], dtype: torch.dtype) -> None:
    kernel, plain = both(shape, dtype, "cpu")
    assert kernel.dtype == plain.dtype == dtype and torch.equal(kernel, plain)
