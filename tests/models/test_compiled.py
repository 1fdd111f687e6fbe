"""Limits on the number of compiled variants that torch keeps per function."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch._dynamo.exc import FailOnRecompileLimitHit

from armature.components.models.compiled import copy_function


def _double(x: Tensor) -> Tensor:
    return 2 * x


def test_copied_function_has_its_own_recompile_limit():
    limits = torch._dynamo.config.patch(recompile_limit=1, fail_on_recompile_limit_hit=True)
    with limits:
        for size in (2, 3):
            x = torch.ones(size)
            assert torch.equal(torch.compile(copy_function(_double), backend="eager", dynamic=False)(x), 2 * x)
        torch.compile(_double, backend="eager", dynamic=False)(torch.ones(2))
        with pytest.raises(FailOnRecompileLimitHit):
            torch.compile(_double, backend="eager", dynamic=False)(torch.ones(3))
