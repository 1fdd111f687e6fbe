"""A function of tensors as one CUDA graph: its kernels are launched together, without Python between them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Function = Callable[[Sequence[Tensor]], Tensor]


class GraphedFunction:
    """Calls `function` by replaying its kernels; one graph is kept, and made again when an input's layout changes.

    Inputs may be on any device, `function` gets them on `device`. It may read other memory as well, a model's weights
    say, as long as it stays where it is; it must have no random draws and no decision that depends on values.
    """

    def __init__(self, function: Function, device: torch.device) -> None:
        self.function, self.device = function, device
        self._layout: tuple[object, ...] = ()
        self._graph: torch.cuda.CUDAGraph | None = None
        self._inputs: list[Tensor] = []
        self._output: Tensor | None = None

    def __call__(self, inputs: Sequence[Tensor]) -> Tensor:
        layout = tuple((one.shape, one.dtype) for one in inputs)
        if self._graph is None or layout != self._layout:
            self._capture(inputs)
            self._layout = layout
        for own, given in zip(self._inputs, inputs, strict=True):
            own.copy_(given, non_blocking=True)
        assert self._graph is not None and self._output is not None
        self._graph.replay()
        return self._output.clone()

    def _capture(self, inputs: Sequence[Tensor]) -> None:
        self._graph, self._output = None, None  # its memory is free before the next graph takes some
        self._inputs = [one.to(self.device, copy=True, memory_format=torch.contiguous_format) for one in inputs]
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self.function(self._inputs)  # libraries choose their kernels and take their workspaces before the capture
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._output = self.function(self._inputs)
        self._graph = graph
