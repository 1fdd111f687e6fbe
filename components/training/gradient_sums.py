"""Gradients of bf16 weights, summed in fp32 over micro-batches, and over ranks during the last backward pass."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from functools import cache

import torch
from torch import Tensor, nn

from armature.components.models.flash import TRITON
from armature.components.training.ranks import ALONE_ELEMENTS, Ranks


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
    from armature.components.training.kernels import add

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


class OverlappedAllReduce:
    """All-reduces large gradients from hooks in the last backward pass of an update.

    All ranks must begin the same sums in the same order: the one in which rank 0 got gradients in the previous update,
    then those that only other ranks got. A gradient that has not arrived holds up those behind it; one that a rank
    lacks counts as zero, and its sum begins in `finish`. The first update overlaps nothing, and the first one that no
    longer reaches a parameter still sums it.

    Between `start` and `finish` no host may wait for another rank: a GPU may be waiting for a sum that the other
    host has not begun.

    Args:
        parameters: those trained, in the same order on all ranks.
        sums: of the micro-batches of this rank; its `added` is set.
    """

    def __init__(self, ranks: Ranks, parameters: Sequence[nn.Parameter], sums: GradientSums) -> None:
        self._ranks, self._parameters, self._sums = ranks, parameters, sums
        self._index = {parameter: i for i, parameter in enumerate(parameters)}
        self._order, self._in_last_pass = list[nn.Parameter](), False
        self._arrived = dict[nn.Parameter, None]()
        self._pending = dict[nn.Parameter, Callable[[], None]]()
        sums.added = self._added

    def start(self) -> None:
        """Call before the last backward pass of an update.

        Raises:
            RuntimeError: it was called already.
        """
        if self._in_last_pass:
            raise RuntimeError("a backward pass follows the last one of an update")
        self._in_last_pass = True

    def finish(self) -> list[nn.Parameter]:
        """Wait for the sums. Every rank calls it.

        Returns:
            The parameters that still have to be summed, the same on all ranks.
        """
        own = [self._index[parameter] for parameter in self._arrived | dict.fromkeys(self._sums.totals)]
        for parameter in self._order[len(self._pending) :]:
            self._begin(parameter)
        reached = [self._parameters[i] for i in dict.fromkeys(i for part in self._ranks.gather(own) for i in part)]
        for wait in self._pending.values():
            wait()
        for parameter in self._pending.keys() - set(reached):
            del self._sums.totals[parameter]
        rest = [parameter for parameter in reached if parameter not in self._pending]
        self._order = [parameter for parameter in reached if parameter.numel() >= ALONE_ELEMENTS]
        self._pending.clear()
        self.discard()
        return sorted(rest, key=self._index.__getitem__)

    def discard(self) -> None:
        """Forget which gradients have arrived.

        Raises:
            RuntimeError: sums have begun, which all ranks have to finish.
        """
        if self._pending:
            raise RuntimeError("gradients are being summed over the ranks and cannot be discarded")
        self._in_last_pass = False
        self._arrived.clear()

    def _added(self, parameter: nn.Parameter) -> None:
        if not self._in_last_pass:
            return
        if parameter in self._arrived:
            raise RuntimeError(f"a weight {tuple(parameter.shape)} got a second gradient in the last backward pass")
        self._arrived[parameter] = None
        while len(self._pending) < len(self._order) and self._order[len(self._pending)] in self._arrived:
            self._begin(self._order[len(self._pending)])

    def _begin(self, parameter: nn.Parameter) -> None:
        totals = self._sums.totals
        if parameter not in totals:
            totals[parameter] = torch.zeros_like(parameter, dtype=torch.float32)
        totals[parameter] = totals[parameter].contiguous()
        self._pending[parameter] = self._ranks.begin_sum(totals[parameter])
