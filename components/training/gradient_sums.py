"""Gradient accumulation for bf16 weights: in fp32 over micro-batches, and over ranks during the last backward pass."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from functools import cache

import torch
from torch import Tensor, nn

from armature.components.models.flash import TRITON
from armature.components.training.ranks import ALONE_ELEMENTS, Ranks


def sum_in_fp32(model: nn.Module) -> GradientSums:
    """Accumulate the gradients of the trained parameters of `model` in fp32, whatever their dtype.

    autograd can do this by itself in two passes over memory: cast, then add. For a matrix that belongs to one layer, on
    a GPU with Triton, a kernel does it in one pass. Tied matrices and vectors are left to autograd with a cast to fp32
    first, because autograd may add several of their gradients within one backward pass, and would add them in bf16.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    uses = Counter(id(each) for module in model.modules() for each in module._parameters.values())
    fast = [p for p in trained if p.is_cuda and p.dtype == torch.bfloat16 and p.ndim >= 2 and uses[id(p)] == 1]
    return GradientSums(trained, fast if TRITON else [])


@cache
def _kernel() -> Callable[[Tensor, Tensor, bool], None]:
    from armature.components.training.kernels import add

    return add


class GradientSums:
    """Accumulates the gradients of `parameters` in fp32 from autograd hooks.

    Until `give` is called no parameter has a `.grad`: torch.compile breaks the graph of a layer whose weights are bf16
    and whose `.grad` is fp32. A model can have at most one instance.

    `totals` has the sums so far, in the order in which parameters got their first gradient. `added` is a callback that
    gets a parameter each time a gradient was added to its sum.

    Args:
        fast: the subset of `parameters` whose gradients arrive in the parameter's dtype and are added by `add`.
        add: called as `add(total, gradient, more)`; adds the gradient to `total`, or overwrites `total` if `more` is
            False. By default a Triton kernel.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        fast: Collection[nn.Parameter],
        add: Callable[[Tensor, Tensor, bool], None] | None = None,
    ) -> None:
        self._add, self.totals, by_kernel = add, dict[nn.Parameter, Tensor](), set(fast)
        self.added: Callable[[nn.Parameter], None] = lambda parameter: None
        for parameter in parameters:
            # With grad_dtype None `.grad` may be bf16, as autograd makes it, and later the fp32 sum.
            parameter.grad_dtype = None if parameter in by_kernel else torch.float32
            parameter.register_post_accumulate_grad_hook(self._take_fast if parameter in by_kernel else self._take)

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
        """Set the `.grad` of each parameter to the sum of its gradients so far, and start new sums."""
        for parameter, total in self.totals.items():
            parameter.grad = total
        self.totals.clear()

    def discard(self) -> None:
        """Drop the sums of gradients accumulated so far."""
        self.totals.clear()


class OverlappedAllReduce:
    """All-reduces large gradients while the last backward pass of an update is still running.

    All ranks must start the same all-reduces in the same order. The order is the one in which rank 0 got its gradients
    in the previous update, followed by parameters that only other ranks reached. A gradient that has not arrived yet
    blocks those behind it. If a rank gets no gradient for a parameter, it counts as zero, and its sum starts in
    `finish`. So nothing overlaps in the first update, and a parameter that no longer gets gradients on any rank is
    summed once more.

    Between `start` and `finish` no host may wait for another rank: its GPU may be waiting for an all-reduce that the
    other host has not started, which would be a deadlock.

    Args:
        parameters: the trained parameters, in the same order on all ranks.
        sums: the gradients that this rank accumulates; its `added` callback is replaced.
    """

    def __init__(self, ranks: Ranks, parameters: Sequence[nn.Parameter], sums: GradientSums) -> None:
        self._ranks, self._parameters, self._sums = ranks, parameters, sums
        self._index = {parameter: i for i, parameter in enumerate(parameters)}
        self._order, self._in_last_pass = list[nn.Parameter](), False
        self._arrived = dict[nn.Parameter, None]()
        self._pending = dict[nn.Parameter, Callable[[], None]]()
        sums.added = self._added

    def start(self) -> None:
        """Allow all-reduces to start from now on. Call it before the last backward pass of an update.

        Raises:
            RuntimeError: it was already called for this update.
        """
        if self._in_last_pass:
            raise RuntimeError("a backward pass follows the last one of an update")
        self._in_last_pass = True

    def finish(self) -> list[nn.Parameter]:
        """Wait until the all-reduces are done. Every rank calls it.

        Returns:
            The parameters that still have to be summed over the ranks, the same list on all ranks.
        """
        reached_here = [self._index[parameter] for parameter in self._arrived | dict.fromkeys(self._sums.totals)]
        for parameter in self._order[len(self._pending) :]:
            self._begin(parameter)
        indices = dict.fromkeys(i for part in self._ranks.gather(reached_here) for i in part)
        reached = [self._parameters[i] for i in indices]
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
            RuntimeError: all-reduces are in progress; only `finish` on all ranks can end them.
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
