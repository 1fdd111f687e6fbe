"""Run a function of tensors as a CUDA graph, which launches all its kernels at once without Python in between."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

Output = TypeVar("Output")
MAX_GRAPHS = 4
"""Largest number of graphs to keep for one function. They share working memory, but each has its own outputs."""


class GraphedFunction(Generic[Output]):
    """Wraps `function` so that a call replays a CUDA graph; on a CPU, `function` is called directly.

    There is a graph for each combination of input shapes and dtypes, and the `MAX_GRAPHS` most recent ones are kept.
    Inputs may be on any device; `function` gets them on `device`. It may read other tensors, such as a model's weights,
    that keep their address. It must not draw random numbers or branch on values of tensors. Each call overwrites the
    tensors that the previous call returned.
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
            while len(self._graphs) >= MAX_GRAPHS:
                del self._graphs[next(iter(self._graphs))]
            graph = _Graph(self.function, inputs, self.device, self._pool)
        self._graphs[layout] = graph
        return graph.replay(inputs)


class _Graph(Generic[Output]):
    """A captured CUDA graph of a function, with the static tensors that it reads and writes."""

    def __init__(
        self, function: Callable[[Sequence[Tensor]], Output], inputs: Sequence[Tensor], device: torch.device, pool: Any
    ) -> None:
        self._inputs = [one.to(device, copy=True, memory_format=torch.contiguous_format) for one in inputs]
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            function(self._inputs)  # warm up: libraries must choose kernels and allocate workspaces before the capture
        torch.cuda.current_stream().wait_stream(stream)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, pool=pool):
            self._output = function(self._inputs)

    def replay(self, inputs: Sequence[Tensor]) -> Output:
        """Copy `inputs` to the static tensors, launch the graph, and return its static outputs."""
        for static, tensor in zip(self._inputs, inputs, strict=True):
            static.copy_(tensor, non_blocking=True)
        self._graph.replay()
        return self._output
