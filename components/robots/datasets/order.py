"""Orders of samples that need no memory: a shuffle and a weighted schedule, both functions of the position."""

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
    """Hash `values` to a 64-bit number, by splitmix64's finalizer over each value in turn."""
    state = 0
    for value in values:
        state = (state ^ (value & _MASK)) + 0x9E3779B97F4A7C15 & _MASK
        state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & _MASK
        state = (state ^ state >> 27) * 0x94D049BB133111EB & _MASK
        state ^= state >> 31
    return state


def permuted(index: int, size: int, key: int) -> int:
    """Return the position of item `index` in the shuffle of `size` items that `key` determines.

    A Feistel network permutes pairs of numbers below the square root of `size`, rounded up, and is repeated until the
    pair is one of the items.

    Example:
        >>> sorted(permuted(index, size=5, key=1) for index in range(5))
        [0, 1, 2, 3, 4]
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
    """Assignment of positions to sources by weight, without memory.

    Among the first n positions, the number of positions of a source differs from its share by at most the number of
    sources plus `BLOCK`. Within blocks of that many positions the order is shuffled, so that the schedule has no period
    that could coincide with the batch size.

    Example:
        >>> schedule = MixtureSchedule([1.0, 3.0], seed=0)
        >>> sum(schedule.at(position)[0] == 1 for position in range(256))
        192
    """

    def __init__(self, weights: Sequence[float], seed: int) -> None:
        fractions = [Fraction(weight) for weight in weights]
        scale = math.lcm(*(each.denominator for each in fractions))
        self._weights = [int(each * scale) for each in fractions]
        self._seed = seed

    def at(self, position: int) -> tuple[int, int]:
        """Return the source of a position, and the number of earlier positions of this source."""
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
        """Return a lower bound on the number of the source's items that are taken before this position.

        It counts all items except those in the position's own block of `BLOCK` positions.
        """
        if len(self._weights) == 1:
            return position
        rest, total = position - position % BLOCK, sum(self._weights)
        for weight in self._weights[:source]:
            rest, total = rest - rest * weight // total, total - weight
        return rest * self._weights[source] // total


# --- Order with locality: files are shuffled, and frames within a few files, so that each rank reads its own files ---

SCHEDULE, FILES = 0, 1


class Window(NamedTuple):
    """Files of a source that a lane reads together, before it continues with the next files.

    The window has frames `first` to `stop` (exclusive) in the sequence of all frames that the lane takes of the source,
    over all epochs.
    """

    source: int
    lane: int
    first: int
    stop: int


@dataclass(frozen=True)
class _Epoch:
    """One epoch of a source: its files in shuffled order, split into lanes, and lanes into windows.

    A place is a frame's index when the shuffled files are concatenated. key: seed of the epoch.
    """

    key: int
    files: Array
    """File numbers in shuffled order, (files,)."""
    file_stops: Array
    """Place after the last frame of each file, (files,)."""
    lane_starts: Array
    """First place of each lane, (lanes,)."""
    begun: Array
    """Number of frames of this source that each lane takes in earlier epochs, (lanes,)."""
    window_stops: Array
    """Place after the last frame of each window, (windows,)."""

    def row(self, lane: int, taken: int) -> int:
        """Return the place that a lane reads next, after it has taken `taken` frames of this source over all epochs."""
        return int(self.lane_starts[lane]) + taken - int(self.begun[lane])

    def window(self, place: int) -> tuple[int, int, int]:
        """Return the window that contains a place, as (number, start, stop). `start` and `stop` are places.

        The window includes `start` but not `stop`.
        """
        number = int(np.searchsorted(self.window_stops, place, side="right"))
        return number, int(self.window_stops[number - 1]) if number else 0, int(self.window_stops[number])

    def frame(self, place: int) -> tuple[int, int]:
        """Return the number of the file that contains a place, and the frame's index within this file."""
        number = int(np.searchsorted(self.file_stops, place, side="right"))
        return int(self.files[number]), place - (int(self.file_stops[number - 1]) if number else 0)

    def shuffled(self, place: int) -> int:
        """Return the place that is read instead of `place`, because the frames of a window are shuffled."""
        number, first, stop = self.window(place)
        return first + permuted(place - first, stop - first, mixed(self.key, number))


class FileShuffle:
    """Assignment of positions to frames of several sources, such that nearby positions need few files.

    Position p belongs to lane p % lanes. In each epoch of a source its files are shuffled and concatenated, and the
    result is cut into lanes; each lane gets as many frames as it has positions in the epoch. Two lanes may share the
    file at a cut, and no frame is left over. A lane reads up to `window` files at once and shuffles their frames. If
    ranks take positions in turn and their number divides the number of lanes, each rank has its own lanes.

    With several sources, each lane has its own schedule of the sources' shares. Memory grows with the number of files;
    the tables of an epoch are computed when one of its positions is first needed.
    """

    def __init__(
        self, weights: Sequence[float], bounds: Sequence[Array], settings: FileShuffleSettings, seed: int
    ) -> None:
        """Prepare the order of several sources.

        Args:
            bounds: an array (files + 1,) for each source. It has the index of each file's first frame, and at its end
                the source's number of frames.
        """
        self._bounds, self._seed = tuple(bounds), seed
        self._lanes, self._window = settings.lanes, settings.window
        self._schedules = [MixtureSchedule(weights, mixed(seed, SCHEDULE, lane)) for lane in range(settings.lanes)]
        self._epochs: list[dict[int, _Epoch]] = [{} for _ in bounds]

    def at(self, position: int) -> tuple[int, int]:
        """Return the sample at a position: the source's number, and the index of the frame within this source."""
        source, lane, taken = self._taken(position)
        epoch = self._epoch_of(source, lane, taken)
        file, frame = epoch.frame(epoch.shuffled(epoch.row(lane, taken)))
        return source, int(self._bounds[source][file]) + frame

    def window(self, position: int) -> Window:
        """Return the window that contains a position."""
        return self._window_at(*self._taken(position))

    def windows(self, window: Window, stop: int) -> list[Window]:
        """Return this window and the lane's next window of the same source.

        A window is left out unless all its frames certainly have positions before `stop`.
        """
        taken = self._schedules[window.lane].passed(int(self._before(stop)[window.lane]), window.source)
        after = self._window_at(window.source, window.lane, window.stop)
        return [each for each in (window, after) if each.stop <= taken]

    def frames(self, window: Window) -> list[tuple[int, int]]:
        """Return the window's frames as one range (first, end) per file.

        Frames are counted within the source, and `end` is exclusive.
        """
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
        """Return the source and the lane of a position, and how many frames of the source the lane has taken before."""
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
        """Return an epoch's tables. Lanes reach the next epoch at different times, so two epochs are cached."""
        cached = self._epochs[source]
        if number not in cached:
            near = {other: table for other, table in cached.items() if abs(other - number) == 1}
            cached = self._epochs[source] = {**near, number: self._built(source, number)}
        return cached[number]

    def _built(self, source: int, number: int) -> _Epoch:
        bounds, key = self._bounds[source], mixed(self._seed, FILES, source, number)
        # Raw numbers of PCG64 are the same in every NumPy version; numbers of Generator methods are not.
        files = np.argsort(np.random.PCG64(key).random_raw(len(bounds) - 1), kind="stable")
        file_stops = np.cumsum(np.diff(bounds)[files])
        begun, ended = (self._before(epoch * int(bounds[-1])) for epoch in (number, number + 1))
        lane_stops = np.cumsum(ended - begun)
        lane_starts = lane_stops - (ended - begun)
        lanes = zip(lane_starts.tolist(), lane_stops.tolist(), strict=True)
        windows = [self._windows(file_stops, start, stop) for start, stop in lanes if stop > start]
        return _Epoch(key, files, file_stops, lane_starts, begun, np.concatenate(windows))

    def _before(self, position: int) -> Array:
        """Return, for each lane, the number of its positions before `position`, (lanes,)."""
        return (position + self._lanes - 1 - np.arange(self._lanes)) // self._lanes

    def _windows(self, file_stops: Array, start: int, stop: int) -> Array:
        """Return the place after the last frame of each window of a lane, (windows,).

        The lane has places `start` to `stop` (exclusive). The windows' numbers of files differ by at most one.
        """
        first = np.searchsorted(file_stops, start, side="right")
        stops = np.append(file_stops[first : np.searchsorted(file_stops, stop)], stop)
        windows = -(-len(stops) // self._window)
        return stops[np.arange(1, windows + 1) * len(stops) // windows - 1]
