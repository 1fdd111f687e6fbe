"""Gradients of weights in bf16, summed in fp32 over micro-batches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor, nn


def sum_in_fp32(model: nn.Module) -> GradientSums | None:
    """Sum the gradients of what `model` trains in fp32, whatever dtype its weights have.

    autograd does so by itself, in two passes over memory. On a GPU with Triton one pass is enough for matrices that
    belong to one layer. Tied matrices and vectors are left to autograd: it may add up several gradients of theirs in
    one backward pass, and would do that in bf16 if it did not make the fp32 sums.

    Returns:
        What keeps the sums of those matrices; None if all are left to autograd.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    uses = Counter(id(own) for module in model.modules() for own in module._parameters.values())
    fast = [p for p in trained if p.is_cuda and p.dtype == torch.bfloat16 and p.ndim >= 2 and uses[id(p)] == 1]
    fast = fast if find_spec("triton") is not None else []
    for parameter in trained:
        parameter.grad_dtype = torch.float32
    return GradientSums(fast, _kernel()) if fast else None


@cache
def _kernel() -> Callable[[Tensor, Tensor, bool], None]:
    from components.training.gradient_kernel import add

    return add


class GradientSums:
    """Takes each gradient of `parameters` as autograd makes it, and gives the sums when they are asked for.

    Args:
        add: puts a gradient into a sum, or with False in place of what is there.
    """

    def __init__(self, parameters: list[nn.Parameter], add: Callable[[Tensor, Tensor, bool], None]) -> None:
        self._add, self._sums = add, dict[nn.Parameter, Tensor]()
        for parameter in parameters:
            parameter.grad_dtype = None  # allows both the bf16 gradients and their fp32 sum
            parameter.register_post_accumulate_grad_hook(self._take)

    def _take(self, parameter: Tensor) -> None:
        assert isinstance(parameter, nn.Parameter) and parameter.grad is not None
        gradient, parameter.grad = parameter.grad, None
        first = parameter not in self._sums
        if first:
            self._sums[parameter] = torch.empty(parameter.shape, dtype=torch.float32, device=parameter.device)
        self._add(self._sums[parameter], gradient, not first)

    def give(self) -> None:
        """Make the sums the parameters' gradients."""
        for parameter, total in self._sums.items():
            parameter.grad = total
        self._sums.clear()

    def discard(self) -> None:
        self._sums.clear()
