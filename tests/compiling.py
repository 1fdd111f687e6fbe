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
    """Let layers become graphs, forward and backward, of torch's own kernels: making others takes a minute on a CPU.

    Sizes of tensors are symbols, as ever. Numbers that a layer holds, such as the size of a head, are constants from
    the start: torch makes symbols of them too, and most of the time goes into what follows from those.
    """
    plain = torch.compile

    def traced(function: Callable[..., Any], *, dynamic: bool | None, **how: Any) -> Callable[..., Any]:
        return plain(function, dynamic=dynamic, backend="aot_eager")

    constants = torch._dynamo.config.patch(specialize_int=True, specialize_float=True)
    with pytest.MonkeyPatch.context() as patch, constants:
        patch.setattr(torch, "compile", traced)
        yield
