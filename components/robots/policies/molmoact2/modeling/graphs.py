"""A function of tensors as one CUDA graph: its kernels are launched together, without Python between them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

Output = TypeVar("Output")
KEPT = 4
"""Graphs of a function. They share the memory that they compute in; their outputs have their own."""


class GraphedFunction(Generic[Output]):
    """Calls `function` by replaying its kernels: a graph for each layout of the inputs, the newest `KEPT` of them.

    Inputs may be on any device, `function` gets them on `device`; on a CPU it is called as it is. It may read other
    memory as well, a model's weights say, as long as it stays where it is; it must have no random draws and no decision
    that depends on values. The next call overwrites the tensors that a call returned.
    """

    def __init__(self, function: Callable[[Sequence[Tensor]], Output], device: torch.device) -> None:
        self.function, self.device = function, device
        self._graphs: dict[tuple[object, ...], _Graph[Output]] = {}
        self._pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None

    def __call__(self, inputs: Sequence[Tensor]) -> Output:
        if self._pool is None:
            return self.function(inputs)
        layout = tuple((one.shape, one.dtype) for one in inputs)
        graph = self._graphs.pop(layout, None)
        if graph is None:
            while len(self._graphs) >= KEPT:
                del self._graphs[next(iter(self._graphs))]
            graph = _Graph(self.function, inputs, self.device, self._pool)
        self._graphs[layout] = graph
        return graph.replay(inputs)


class _Graph(Generic[Output]):
    def __init__(
        self, function: Callable[[Sequence[Tensor]], Output], inputs: Sequence[Tensor], device: torch.device, pool: Any
    ) -> None:
        self._inputs = [one.to(device, copy=True, memory_format=torch.contiguous_format) for one in inputs]
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            function(self._inputs)  # libraries choose their kernels and take their workspaces before the capture
        torch.cuda.current_stream().wait_stream(stream)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, pool=pool):
            self._output = function(self._inputs)

    def replay(self, inputs: Sequence[Tensor]) -> Output:
        for own, given in zip(self._inputs, inputs, strict=True):
            own.copy_(given, non_blocking=True)
        self._graph.replay()
        return self._output
