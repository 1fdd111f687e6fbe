"""Orders of samples that need no memory: a shuffle and a weighted schedule, each a function of the position."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

ROUNDS = 8
BLOCK = 256
_MASK = 2**64 - 1


def mixed(*values: int) -> int:
    """A number of 64 bits that depends on all of `values`: splitmix64's finalizer over each in turn."""
    state = 0
    for value in values:
        state = (state ^ (value & _MASK)) + 0x9E3779B97F4A7C15 & _MASK
        state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & _MASK
        state = (state ^ state >> 27) * 0x94D049BB133111EB & _MASK
        state ^= state >> 31
    return state


def permuted(index: int, size: int, key: int) -> int:
    """Where a shuffle of `size` things, one for each `key`, puts number `index`.

    A Feistel network on pairs of numbers below the root of `size`, walked until the pair names one of the things.
    """
    side = math.isqrt(size - 1) + 1
    while True:
        high, low = divmod(index, side)
        for number in range(ROUNDS):
            high, low = low, (high + mixed(key, number, low)) % side
        index = high * side + low
        if index < size:
            return index


class MixtureSchedule:
    """Which source each position takes, and how many it has taken before.

    Of any `positions` first ones, source s gets its share to within the number of sources, plus what `BLOCK` holds:
    within blocks of that many positions the order is shuffled, so that no period of the schedule meets a batch's.
    """

    def __init__(self, weights: Sequence[float], seed: int) -> None:
        fractions = [Fraction(weight) for weight in weights]
        scale = math.lcm(*(each.denominator for each in fractions))
        self._weights = [int(each * scale) for each in fractions]
        self._seed = seed

    def at(self, position: int) -> tuple[int, int]:
        """The source, and the number of positions of this source before this one."""
        if len(self._weights) == 1:
            return 0, position
        block, offset = divmod(position, BLOCK)
        rest = block * BLOCK + permuted(offset, BLOCK, mixed(self._seed, block))
        total = sum(self._weights)
        for source, weight in enumerate(self._weights):
            before = rest * weight // total
            if (rest + 1) * weight // total > before:
                return source, before
            rest, total = rest - before, total - weight
        raise AssertionError("the last source takes what is left")

    def passed(self, position: int, source: int) -> int:
        """As many of the source's first things as are certain to be taken before this position: all, but for some of
        its block.
        """
        if len(self._weights) == 1:
            return position
        rest, total = position - position % BLOCK, sum(self._weights)
        for weight in self._weights[:source]:
            rest, total = rest - rest * weight // total, total - weight
        return rest * self._weights[source] // total
