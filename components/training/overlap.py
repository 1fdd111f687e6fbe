"""Sums of gradients over ranks that begin while the backward pass still makes others."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from components.training.gradient_sums import GradientSums
from components.training.ranks import ALONE_ELEMENTS, Ranks


class OverlappedAllReduce:
    """Adds up large gradients over ranks, from the hooks of the last backward pass of an update.

    All ranks have to begin the same sums in the same order. It is the order in which gradients came in the update
    before, in its last pass: one that has not come yet holds up those behind it, and one that a rank does not have
    counts as zero there. So no rank's device waits for what the host of another one does, and the first update
    overlaps nothing.

    Args:
        parameters: those trained, in the same order on all ranks.
        sums: of the micro-batches of this rank; its `added` is taken.
    """

    def __init__(self, ranks: Ranks, parameters: Sequence[nn.Parameter], sums: GradientSums) -> None:
        self._ranks, self._parameters, self._sums = ranks, parameters, sums
        self._place = {parameter: i for i, parameter in enumerate(parameters)}
        self._order, self._last = list[nn.Parameter](), False
        self._came, self._waits = dict[nn.Parameter, None](), dict[nn.Parameter, Callable[[], None]]()
        sums.added = self._added

    def start(self) -> None:
        """The next backward pass is the last one before `finish`."""
        assert not self._waits, "the update before was not finished"
        self._last = True

    def finish(self) -> list[nn.Parameter]:
        """Wait for the sums; what is left to be summed, alike on all ranks. Every rank calls it."""
        own = [self._place[parameter] for parameter in self._came | dict.fromkeys(self._sums.totals)]
        for parameter in self._order[len(self._waits) :]:
            self._begin(parameter)
        # In the order of the first rank, then what others alone have.
        reached = [self._parameters[i] for i in dict.fromkeys(i for part in self._ranks.gather(own) for i in part)]
        for wait in self._waits.values():
            wait()
        for parameter in self._waits.keys() - set(reached):
            del self._sums.totals[parameter]
        rest = [parameter for parameter in reached if parameter not in self._waits]
        self._order = [parameter for parameter in reached if parameter.numel() >= ALONE_ELEMENTS]
        self._last = False
        self._came.clear()
        self._waits.clear()
        return sorted(rest, key=self._place.__getitem__)

    def _added(self, parameter: nn.Parameter) -> None:
        if not self._last:
            return
        if parameter in self._waits:
            raise RuntimeError(f"a weight {tuple(parameter.shape)} got a second gradient in one backward pass")
        self._came[parameter] = None
        while len(self._waits) < len(self._order) and self._order[len(self._waits)] in self._came:
            self._begin(self._order[len(self._waits)])

    def _begin(self, parameter: nn.Parameter) -> None:
        totals = self._sums.totals
        if parameter not in totals:
            totals[parameter] = torch.zeros_like(parameter, dtype=torch.float32)
        totals[parameter] = totals[parameter].contiguous()
        self._waits[parameter] = self._ranks.begin_sum(totals[parameter])
