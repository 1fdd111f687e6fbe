"""Orders of samples that need no memory: a shuffle and a weighted schedule, each a function of the position."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

import numpy as np

from armature.components.robots.datasets.quantiles import Array
from armature.components.robots.datasets.settings import FileShuffleSettings

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


# An order with locality: files are shuffled, and frames within a few files, so that ranks read files of their own.

SCHEDULE, FILES = 0, 1


class Window(NamedTuple):
    """What a lane reads of a source's files before it comes to others: its frames `first` to `stop` (exclusive),
    counted over all that the lane takes of the source.
    """

    source: int
    lane: int
    first: int
    stop: int


@dataclass(frozen=True)
class _Epoch:
    """The frames of a source in a row: its files in their shuffled order, cut into lanes, and lanes into windows."""

    key: int
    files: Array
    """Their numbers, in order: (files,)."""
    file_stops: Array
    """Where each ends in the row: (files,)."""
    lane_starts: Array
    """(lanes,)"""
    begun: Array
    """Positions that each lane had in the epochs before: (lanes,)."""
    window_stops: Array

    def row(self, lane: int, taken: int) -> int:
        """Where a lane is after `taken` positions of all epochs."""
        return int(self.lane_starts[lane]) + taken - int(self.begun[lane])

    def window(self, place: int) -> tuple[int, int, int]:
        """The window's number, where it begins and where it ends."""
        number = int(np.searchsorted(self.window_stops, place, side="right"))
        return number, int(self.window_stops[number - 1]) if number else 0, int(self.window_stops[number])

    def frame(self, place: int) -> tuple[int, int]:
        """The file, and the frame in it."""
        number = int(np.searchsorted(self.file_stops, place, side="right"))
        return int(self.files[number]), place - (int(self.file_stops[number - 1]) if number else 0)

    def shuffled(self, place: int) -> int:
        number, first, stop = self.window(place)
        return first + permuted(place - first, stop - first, mixed(self.key, number))


class FileShuffle:
    """Which frame of which source each position takes.

    Position p is of lane p % lanes. In each epoch of a source its files are shuffled and put in a row, which is cut
    into as many frames for each lane as the lane has positions: two lanes share a file at a cut, and no frame is left
    over. A lane goes through its files by up to `window` at once, whose frames are shuffled. Where the positions of all
    ranks are shared out in turn and their number divides that of the lanes, a rank has lanes of its own.

    Of several sources, each lane takes their shares by a schedule of its own.
    Memory is by file; tables of an epoch are made when one of its positions is first asked for.
    """

    def __init__(
        self, weights: Sequence[float], bounds: Sequence[Array], settings: FileShuffleSettings, seed: int
    ) -> None:
        """
        Args:
            bounds: Of each source, the first frame of each file, from 0, and the number of all frames: (files + 1,).
        """
        self._bounds, self._seed = tuple(bounds), seed
        self._lanes, self._window = settings.lanes, settings.window
        self._schedules = [MixtureSchedule(weights, mixed(seed, SCHEDULE, lane)) for lane in range(settings.lanes)]
        self._epochs: list[dict[int, _Epoch]] = [{} for _ in bounds]

    def at(self, position: int) -> tuple[int, int]:
        """The source and its frame."""
        source, lane, taken = self._taken(position)
        epoch = self._epoch_of(source, lane, taken)
        file, frame = epoch.frame(epoch.shuffled(epoch.row(lane, taken)))
        return source, int(self._bounds[source][file]) + frame

    def window(self, position: int) -> Window:
        """The window that a position is in."""
        return self._window_at(*self._taken(position))

    def windows(self, window: Window, stop: int) -> list[Window]:
        """The window and the one after it, if all of their frames are certain to be at positions before `stop`."""
        taken = self._schedules[window.lane].passed(int(self._before(stop)[window.lane]), window.source)
        after = self._window_at(window.source, window.lane, window.stop)
        return [each for each in (window, after) if each.stop <= taken]

    def frames(self, window: Window) -> list[tuple[int, int]]:
        """Of each file in the window the source's frames from the first to the last (exclusive)."""
        source, lane, taken, end = window
        epoch, bounds = self._epoch_of(source, lane, taken), self._bounds[source]
        place, runs = epoch.row(lane, taken), list[tuple[int, int]]()
        stop = place + end - taken
        while place < stop:
            file, frame = epoch.frame(place)
            first = int(bounds[file]) + frame
            last = min(int(bounds[file + 1]), first + stop - place)
            runs.append((first, last))
            place += last - first
        return runs

    def _taken(self, position: int) -> tuple[int, int, int]:
        """The source, the lane, and how many positions of the source the lane had before."""
        turn, lane = divmod(position, self._lanes)
        source, taken = self._schedules[lane].at(turn)
        return source, lane, taken

    def _window_at(self, source: int, lane: int, taken: int) -> Window:
        epoch = self._epoch_of(source, lane, taken)
        place = epoch.row(lane, taken)
        _, first, stop = epoch.window(place)
        return Window(source, lane, taken + first - place, taken + stop - place)

    def _epoch_of(self, source: int, lane: int, taken: int) -> _Epoch:
        return self._epoch(source, (taken * self._lanes + lane) // int(self._bounds[source][-1]))

    def _epoch(self, source: int, number: int) -> _Epoch:
        """Lanes come to the next epoch one after another, so two are kept."""
        known = self._epochs[source]
        if number not in known:
            near = {other: table for other, table in known.items() if abs(other - number) == 1}
            known = self._epochs[source] = {**near, number: self._built(source, number)}
        return known[number]

    def _built(self, source: int, number: int) -> _Epoch:
        bounds, key = self._bounds[source], mixed(self._seed, FILES, source, number)
        # PCG64's numbers stay as they are with every NumPy, as those of a Generator's methods do not.
        files = np.argsort(np.random.PCG64(key).random_raw(len(bounds) - 1), kind="stable")
        file_stops = np.cumsum(np.diff(bounds)[files])
        begun, ended = (self._before(epoch * int(bounds[-1])) for epoch in (number, number + 1))
        lane_stops = np.cumsum(ended - begun)
        lane_starts = lane_stops - (ended - begun)
        lanes = zip(lane_starts.tolist(), lane_stops.tolist(), strict=True)
        windows = [self._windows(file_stops, start, stop) for start, stop in lanes if stop > start]
        return _Epoch(key, files, file_stops, lane_starts, begun, np.concatenate(windows))

    def _before(self, position: int) -> Array:
        """How many of the positions before this one each lane has: (lanes,)."""
        return (position + self._lanes - 1 - np.arange(self._lanes)) // self._lanes

    def _windows(self, file_stops: Array, start: int, stop: int) -> Array:
        """Where the windows of a lane end, with as many files in each as can be, to within one."""
        first = np.searchsorted(file_stops, start, side="right")
        stops = np.append(file_stops[first : np.searchsorted(file_stops, stop)], stop)
        windows = -(-len(stops) // self._window)
        return stops[np.arange(1, windows + 1) * len(stops) // windows - 1]
