"""The kernel of weights in 4 bits on a CPU; `test_interpreted` runs this file with TRITON_INTERPRET=1.

In fp32 and fp16: the interpreter truncates to bf16, where a GPU rounds to the nearest.
"""

from __future__ import annotations

import pytest
import torch

from .test_nf4_kernel import both


@pytest.mark.parametrize("shape", [(1, 2), (3, 50), (64, 64), (37, 258)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_kernel_gives_the_bits_of_the_plain_way(shape: tuple[int, int], dtype: torch.dtype) -> None:
    kernel, plain = both(shape, dtype, "cpu")
    assert kernel.dtype == plain.dtype == dtype and torch.equal(kernel, plain)
