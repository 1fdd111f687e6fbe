"""Which episodes of a dataset are used."""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload

import numpy as np

from armature.components.datasets.lerobot.episodes import EpisodeIndex
from armature.components.datasets.statistics import Array


class EpisodeSelection(Sequence[int]):
    """Ascending numbers of episodes, kept as runs of consecutive ones: memory is by run, not by episode."""

    def __init__(self, numbers: Sequence[int] | Array) -> None:
        """
        Args:
            numbers: Ascending, none twice.
        """
        if isinstance(numbers, range) and numbers.step == 1:
            self._firsts, self._ends = np.array([numbers.start]), np.array([len(numbers)])
            return
        listed = np.asarray(numbers, np.int64)
        begins = np.flatnonzero(np.diff(listed, prepend=-2) != 1)
        self._firsts, self._ends = listed[begins], np.append(begins[1:], len(listed))

    def __len__(self) -> int:
        return int(self._ends[-1])

    @overload
    def __getitem__(self, index: int) -> int: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[int, ...]: ...

    def __getitem__(self, index: int | slice) -> int | tuple[int, ...]:
        if isinstance(index, slice):
            return tuple(self.numbers()[index].tolist())
        place = range(len(self))[index]
        run = int(np.searchsorted(self._ends, place, side="right"))
        before = int(self._ends[run - 1]) if run else 0
        return int(self._firsts[run]) + place - before

    def __contains__(self, number: object) -> bool:
        run = int(np.searchsorted(self._firsts, number, side="right")) - 1 if isinstance(number, int) else -1
        return run >= 0 and number - self._firsts[run] < self._counts[run]

    @property
    def _counts(self) -> Array:
        return np.diff(self._ends, prepend=0)

    @property
    def nbytes(self) -> int:
        return self._firsts.nbytes + self._ends.nbytes

    def numbers(self) -> Array:
        """All of them: int64 (episodes,)."""
        return np.repeat(self._firsts - self._ends + self._counts, self._counts) + np.arange(len(self))

    def between(self, first: int, last: int) -> Array:
        """Those from `first` to `last`, both included: int64 (episodes,)."""
        ends = self._firsts + self._counts
        runs = range(int(np.searchsorted(ends, first, side="right")), int(np.searchsorted(self._firsts, last, "right")))
        spans = [np.arange(max(first, self._firsts[run]), min(last + 1, ends[run])) for run in runs]
        return np.concatenate([np.zeros(0, np.int64), *spans])

    def frames(self, index: EpisodeIndex) -> tuple[Array, Array]:
        """Of each run the dataset's first frame, and the selection's frames until the run's end."""
        stops = index.numbers["stop"]
        firsts = np.where(self._firsts > 0, stops[self._firsts - 1], 0)
        return firsts, np.cumsum(stops[self._firsts + self._counts - 1] - firsts)

    def before(self, frames: Array, index: EpisodeIndex) -> Array:
        """How many frames of the selection come before each of these of the dataset: (frames,)."""
        firsts, stops = self.frames(index)
        run = np.maximum(np.searchsorted(firsts, frames, side="right") - 1, 0)
        begins = np.concatenate([[0], stops])[run]
        return begins + np.clip(frames - firsts[run], 0, stops[run] - begins)


def selection(numbers: Sequence[int]) -> EpisodeSelection:
    """The numbers, ascending, as runs."""
    return numbers if isinstance(numbers, EpisodeSelection) else EpisodeSelection(numbers)
