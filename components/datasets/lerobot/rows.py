"""The columns that say which frame a row of a data file is: episode, number, time."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from armature.components.contracts.errors import DataError
from armature.components.datasets.lerobot.columns import to_numpy
from armature.components.datasets.lerobot.layout import OWN_FEATURES
from armature.components.datasets.statistics import Array

TOLERANCE = 1e-4
"""Seconds that a time may be off: LeRobot's `tolerance_s`."""
PLACES = ("episode_index", "frame_index", "index", "timestamp")


@dataclass(frozen=True)
class ExpectedRows:
    """The rows of consecutive episodes: `lengths` (episodes,) frames each, from frame `start` of the dataset on."""

    episode: int
    start: int
    lengths: Array
    fps: float

    def check(self, table: pa.Table, path: str, row: int) -> None:
        """Check `PLACES` of `table`, which begins at row `row` of the data file at `path`.

        Rows of an episode follow one another: `frame_index` and `index` grow by 1, `timestamp` by 1 / fps. An episode
        that was cut at its start may begin at a later time.

        Raises:
            DataError: a row is not the expected one; the error names episode and row.
        """
        columns = {name: self._numbers(table, name, path, row) for name in PLACES}
        episodes, frames, index, times = columns.values()
        numbers = np.repeat(np.arange(self.episode, self.episode + len(self.lengths)), self.lengths)
        wrong = episodes[: len(numbers)] != numbers[: len(episodes)]
        if len(episodes) != len(numbers) or wrong.any():
            at = int(np.argmax(wrong)) if wrong.any() else len(episodes)
            raise DataError(
                f"{len(episodes)} of {len(numbers)} frames are there, and this row is not the episode's",
                code="episode_rows_mismatch",
                where=f"{path}, episode {numbers[min(at, len(numbers) - 1)]}, row {row + at}",
                remedy="meta/episodes and the data files do not belong together; fetch the dataset again",
            )
        begins = np.cumsum(self.lengths) - self.lengths
        first = np.repeat(begins, self.lengths)
        within = np.arange(len(numbers)) - first
        index_of = self.start + np.arange(len(numbers))
        frame_of = np.maximum(frames[first], 0) + within
        seconds = times.astype(np.float64)
        with np.errstate(over="ignore", invalid="ignore"):  # NaN and infinities compare as wrong
            begin = np.where(frames > 0, frames / self.fps, np.maximum(seconds, 0))
            second_of = np.where(within > 0, np.roll(seconds, 1) + 1 / self.fps, begin)
            slack = TOLERANCE + (np.spacing(np.abs(times)) if times.dtype.kind == "f" else 0.0)
            late = ~(np.abs(seconds - second_of) <= slack)
        for name, values, expected, wrong in (
            ("index", index, index_of, index != index_of),
            ("frame_index", frames, frame_of, frames != frame_of),
            ("timestamp", seconds, second_of, late),
        ):
            if wrong.any():
                at = int(np.argmax(wrong))
                raise DataError(
                    f"{name} is {values[at]:.9g}, not {expected[at]:.9g}: rows follow one another, "
                    f"{self.fps:g} a second",
                    code="row_out_of_order",
                    where=f"{path}, episode {numbers[at]}, row {row + at}",
                    remedy="rows are missing or out of order, or fps in meta/info.json is not the rows'; "
                    "split the episode there, or record it again",
                )

    def _numbers(self, table: pa.Table, name: str, path: str, row: int) -> Array:
        if name not in table.column_names:
            raise DataError(f"the data file has no column {name!r}", code="column_missing", where=path)
        column = table[name]
        if column.null_count:
            at = int(np.argmax(column.is_null().to_numpy()))
            ends = np.cumsum(self.lengths)
            episode = self.episode + min(int(np.searchsorted(ends, at, side="right")), len(ends) - 1)
            raise DataError(
                f"{name} is missing", code="feature_value_missing", where=f"{path}, episode {episode}, row {row + at}"
            )
        values: Array = to_numpy(column, name, OWN_FEATURES[name], f"{path}, from episode {self.episode}")[:, 0]
        return values
