"""Compiled layers in tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch._dynamo
import torch._functorch.config
from functorch.compile import make_boxed_func
from torch._inductor.compile_fx import compile_fx


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


@contextmanager
def without_kernels() -> Iterator[None]:
    """Inside the block, Inductor divides a layer into a forward and a backward graph as it always does, but torch's own
    kernels run them."""

    def divided(graph: torch.fx.GraphModule, inputs: list[Any], **how: Any) -> Any:
        with torch._functorch.config.patch(enable_autograd_cache=False):
            return compile_fx(graph, inputs, inner_compile=lambda part, *_, **__: make_boxed_func(part), **how)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("armature.components.models.compiled.compile_fx", divided)
        yield
