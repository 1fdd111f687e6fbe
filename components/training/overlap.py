"""All-reduces gradients while the backward pass is still computing others."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from armature.components.training.gradient_sums import GradientSums
from armature.components.training.peer_copies import peer_copies
from armature.components.training.ranks import ALONE_ELEMENTS, Ranks


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
        large = any(parameter.numel() >= ALONE_ELEMENTS for parameter in parameters)
        self._begin_sum = ((peer_copies(ranks) if large else None) or ranks).begin_sum
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
        self._pending[parameter] = self._begin_sum(totals[parameter])
