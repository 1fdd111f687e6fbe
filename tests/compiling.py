"""Compiled layers in tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch._dynamo


@contextmanager
def trace_only() -> Iterator[None]:
    """Inside the block, let torch.compile trace the forward and backward graphs of layers, but run them with torch's
    own kernels. Compiling kernels takes a minute on a CPU.

    As usual, the sizes of tensors are symbols in the graphs. The numbers that a layer stores, such as the size of a
    head, are constants here. torch would make symbols of them too, which would take most of the time.
    """
    plain = torch.compile

    def traced(function: Callable[..., Any], *, dynamic: bool | None, **how: Any) -> Callable[..., Any]:
        return plain(function, dynamic=dynamic, backend="aot_eager")

    constants = torch._dynamo.config.patch(specialize_int=True, specialize_float=True)
    with pytest.MonkeyPatch.context() as patch, constants:
        patch.setattr(torch, "compile", traced)
        yield
