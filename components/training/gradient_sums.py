"""Gradients of weights in bf16, summed in fp32 over micro-batches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from functools import cache

import torch
from torch import Tensor, nn

from armature.components.models.installed import TRITON


def sum_in_fp32(model: nn.Module) -> GradientSums:
    """Sum the gradients of what `model` trains in fp32, whatever dtype its weights have.

    autograd can do so by itself, in two passes over memory. On a GPU with Triton one pass is enough for matrices that
    belong to one layer. For tied matrices and vectors autograd casts to fp32 first: it may add several gradients in one
    backward pass, and would otherwise add them in bf16.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    uses = Counter(id(own) for module in model.modules() for own in module._parameters.values())
    fast = [p for p in trained if p.is_cuda and p.dtype == torch.bfloat16 and p.ndim >= 2 and uses[id(p)] == 1]
    return GradientSums(trained, fast if TRITON else [])


@cache
def _kernel() -> Callable[[Tensor, Tensor, bool], None]:
    from armature.components.training.gradient_kernel import add

    return add


class GradientSums:
    """Takes each gradient of `parameters` as autograd makes it, and gives the sums when they are asked for.

    Until then no parameter has a `.grad`: torch.compile breaks the graph of a layer whose weights are bf16 and whose
    `.grad` is fp32. A model has one of these at most.

    `totals` are the sums so far, in the order in which the first gradients came. `added` is called with a parameter
    after a gradient was added to its sum.

    Args:
        fast: of `parameters`, those whose gradients come in their own dtype.
        add: puts such a gradient into a sum, or with False in place of what is there; None: by a kernel.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        fast: Collection[nn.Parameter],
        add: Callable[[Tensor, Tensor, bool], None] | None = None,
    ) -> None:
        self._add, self.totals, own = add, dict[nn.Parameter, Tensor](), set(fast)
        self.added: Callable[[nn.Parameter], None] = lambda parameter: None
        for parameter in parameters:
            # None allows both the gradients in bf16 and their sum in fp32.
            parameter.grad_dtype = None if parameter in own else torch.float32
            parameter.register_post_accumulate_grad_hook(self._take_fast if parameter in own else self._take)

    def _take(self, parameter: Tensor) -> None:
        assert isinstance(parameter, nn.Parameter) and parameter.grad is not None
        gradient, parameter.grad = parameter.grad, None
        if parameter in self.totals:
            self.totals[parameter] += gradient
        else:
            self.totals[parameter] = gradient
        self.added(parameter)

    def _take_fast(self, parameter: Tensor) -> None:
        assert isinstance(parameter, nn.Parameter) and parameter.grad is not None
        gradient, parameter.grad = parameter.grad, None
        first = parameter not in self.totals
        if first:
            self.totals[parameter] = torch.empty(parameter.shape, dtype=torch.float32, device=parameter.device)
        (self._add or _kernel())(self.totals[parameter], gradient, not first)
        self.added(parameter)

    def give(self) -> None:
        """Make the sums the parameters' gradients."""
        for parameter, total in self.totals.items():
            parameter.grad = total
        self.totals.clear()

    def discard(self) -> None:
        self.totals.clear()
