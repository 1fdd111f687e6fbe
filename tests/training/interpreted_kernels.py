"""The kernel of the optimizer on a CPU; `test_optimizer` runs this file with TRITON_INTERPRET=1.

In fp16: the interpreter truncates to bf16, where a GPU rounds to the nearest.
"""

from __future__ import annotations

import pytest
import torch

from .update_cases import both_after


@pytest.mark.parametrize("shape", [(1, 1), (37, 55), (1, 4096), (0, 3)])
def test_the_kernel_does_what_the_plain_update_does(shape: tuple[int, int]) -> None:
    kernel, plain = both_after(6, shape, torch.float16, "cpu")
    for ours, theirs in zip(kernel[:3], plain[:3], strict=True):
        last_bit = theirs.float().abs() * 2**-10 + 2**-24
        assert ((ours.float() - theirs.float()).abs() <= last_bit).all()
        assert (ours == theirs).float().sum() >= 0.99 * ours.numel()
    exact = [state[0].float() + state[3].float() for state in (kernel, plain)]
    torch.testing.assert_close(*exact, rtol=0, atol=1e-6)
